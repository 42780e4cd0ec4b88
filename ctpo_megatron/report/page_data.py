"""Pages from `templates/`, and charts as compact JSON: columns, few digits, equal steps as three numbers."""

from __future__ import annotations

import base64
import gzip
import importlib.metadata
import itertools
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.files import aside
from ctpo_megatron.base.text import printable
from ctpo_megatron.report.charts import Chart
from ctpo_megatron.report.theme import CONFIG, DARK, LIGHT, sizes

if TYPE_CHECKING:
    from jinja2 import Environment


log = logging.getLogger(__name__)

_DIGITS = 4
_PAGE_TEXT = 12
"""Text size on the page, pixels."""


def chart_json(charts: Iterable[Chart]) -> str:
    """What the script of the page draws, safe inside of a `<script>` element: theme, and charts by name."""
    drawn = {
        chart.name: {"title": chart.title, "caption": chart.caption, "spec": packed(chart.spec)} for chart in charts
    }
    config = {name: {**CONFIG.get(name, {}), **size} for name, size in sizes(_PAGE_TEXT).items()}
    text = json.dumps({"config": CONFIG | config, "charts": drawn}, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def bundle() -> str:
    """Vega, Vega-Lite, Vega-Embed and the interpreter of their expressions: JavaScript, gzip, base64.

    To make it takes two CPU-seconds, and it is the same for all pages: the user's cache folder keeps it.
    """
    path = _cache() / f"vega-{importlib.metadata.version('vl-convert-python')}.js.gz"
    try:
        content = path.read_bytes()
        gzip.decompress(content)  # raises where it is damaged
    except (OSError, EOFError, zlib.error):
        content = _made_bundle()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with aside(path) as new:
                new.write_bytes(content)
        except OSError as error:  # a home that cannot be written
            log.debug("%s: not kept for the next report", error)
    return base64.b64encode(content).decode("ascii")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ctpo-megatron"


def _made_bundle() -> bytes:
    import vl_convert

    source = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return gzip.compress(source.encode(), 9, mtime=0)


def packed(spec: Any) -> Any:
    """The same specification with each `{"values": rows}` as `{"columns": ...}`, which the script unpacks."""
    if isinstance(spec, Mapping):
        rows = spec.get("values")
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            names = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
            return {"columns": {name: _column([row.get(name) for row in rows]) for name in names}, "length": len(rows)}
        return {name: packed(value) for name, value in spec.items()}
    if isinstance(spec, list):
        return [packed(value) for value in spec]
    return spec


def _column(values: Sequence[Any]) -> list[Any] | dict[str, Any]:
    """Numbers in full, or as runs [first, step, count]; others as runs [value, count]."""
    if not all(isinstance(value, (int, float)) or value is None for value in values):
        return {"equal": [[value, len([*group])] for value, group in itertools.groupby(values)]}
    runs: list[list[float]] = []
    for value in values:
        if value is None:
            break
        if runs and (runs[-1][2] == 1 or value == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            runs[-1][1] = value - runs[-1][0] if runs[-1][2] == 1 else runs[-1][1]
            runs[-1][2] += 1
        else:
            runs.append([value, 0, 1])
    else:
        if 4 * len(runs) <= len(values):
            return {"steps": runs}
    return [None if value is None else _rounded(value) for value in values]


def _rounded(value: float) -> float:
    if isinstance(value, int):
        return value
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short == int(short) else short


_TEMPLATES = Path(__file__).parent / "templates"


def rendered(template: str, **values: Any) -> str:
    """The page. Raises jinja2.UndefinedError for a value that the template wants and is not given."""
    return _environment().get_template(template).render(colours={"light": LIGHT, "dark": DARK}, **values)


def _shown(value: Any) -> Any:
    """Texts of models and data show what would hide or reorder what stands next to it."""
    return type(value)(printable(value, lines=True)) if isinstance(value, str) else value


@cache
def _environment() -> Environment:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
