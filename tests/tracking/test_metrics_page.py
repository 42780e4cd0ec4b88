"""The table of metrics against the code: no metric without a row, and no row that no code writes.

Names are found in the strings of the package. Some are put together: `f"{name}_mean"` below `f"rollout_corr/{name}"`.
tests/end_to_end/test_ring.py compares the rows with what a run writes.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from ctpo_megatron.base.positions import COLUMNS
from ctpo_megatron.tracking import KNOWN_METRICS
from tests.test_links import ROOT

ROWS = [name for row in KNOWN_METRICS for name in row.names]
WRITTEN = [row.source or name for row in KNOWN_METRICS for name in row.names]
"""What the code of a step calls them."""
PLACEHOLDER = re.compile(r"<(\w+)>")
PARTS = {"bound": "high", "sign": "positive", "of": "mean"}
"""Placeholder -> a word that the code spells out; `OWN` for others, which code fills in."""
OWN = "0"
NO_METRICS = {"tokens/s"}
"""A unit."""
TOGETHER = "positive_uncertain"
"""Of two values, one after the other, in an f-string: no pattern can tell them apart."""
METRIC, WORD = re.compile(r"[\w/@]+"), re.compile("[a-z]{2}|@")


@cache
def strings() -> tuple[set[str], list[re.Pattern[str]]]:
    """Strings of the package that may be a metric or a part of its name: plain ones, and those with values in them."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "ctpo_megatron").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    plain = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside
    }
    constants = {
        target.id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }
    spelled = {tuple(_text(part, constants) for part in node.values) for node in joined}
    patterns = [
        "".join("(.*)" if part is None else re.escape(part) for part in parts)
        for parts in spelled
        if METRIC.fullmatch("".join(part or "" for part in parts)) and any(map(WORD.search, filter(None, parts)))
    ]
    return {text for text in plain if METRIC.fullmatch(text)}, list(map(re.compile, patterns))


def _text(part: ast.expr, constants: dict[str, str]) -> str | None:
    """A part of an f-string, where it is the same always."""
    if isinstance(part, ast.FormattedValue):
        return constants.get(part.value.id) if isinstance(part.value, ast.Name) else None
    return str(part.value) if isinstance(part, ast.Constant) else None


@cache
def written(name: str, depth: int = 3) -> bool:
    """Whether code has the name, or a string with values that gives it; a value again is a string or such a one."""
    plain, patterns = strings()
    if name in plain or name in ("", OWN, TOGETHER):
        return True
    found = (pattern.fullmatch(name) for pattern in patterns if depth)
    return any(all(written(part, depth - 1) for part in match.groups()) for match in found if match)


def example(row: str) -> str:
    return PLACEHOLDER.sub(lambda match: PARTS.get(match[1], OWN), row)


def test_every_row_is_written_by_some_code() -> None:
    assert len(ROWS) > 200
    assert [name for name in WRITTEN if not written(example(name))] == []
    assert not any(written(f"{example(name)}_zyx") for name in WRITTEN if not name.endswith(">"))


def test_every_metric_that_code_names_has_a_row() -> None:
    known = re.compile("|".join(PLACEHOLDER.sub("[^/]+", re.escape(row)) for row in ROWS if row != "reward/<name>"))
    groups = {row.partition("/")[0] for row in ROWS}
    plain, _ = strings()
    named = {name for name in plain if re.fullmatch(r"\w+(/[\w@]+)+", name) and name.partition("/")[0] in groups}
    assert len(named) > 100
    assert sorted(name for name in named - NO_METRICS if not known.fullmatch(name.removesuffix("_cpu"))) == []


def test_every_column_of_positions_has_a_row() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    columns = [name for name in names if "/" not in name]
    assert len(columns) == len(COLUMNS) and set(columns) == set(COLUMNS)


def test_no_metric_has_two_rows() -> None:
    assert len(ROWS) == len(set(ROWS))
