"""docs/reference/metrics.md against the code: no metric without a row, and no row that no code writes.

Names are found in the strings of the package. Some are put together: `f"{name}_mean"` below `f"rollout_corr/{name}"`.
tests/end_to_end/test_ring.py compares the rows with what a run writes.
"""

from __future__ import annotations

import ast
import re
from functools import cache

from ctpo_megatron.base.positions import COLUMNS
from tests.test_links import ROOT

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
FIRST_CELLS = re.findall(r"^\| (`.+?`) \|", PAGE, re.MULTILINE)
NAMES = [name for cell in FIRST_CELLS for name in re.findall(r"`([^`]+)`", cell)]
ROWS = [name for name in NAMES if "/" in name]
PLACEHOLDER = re.compile(r"<(\w+)>")
PARTS = {"bound": "high", "sign": "positive", "of": "mean"}
"""Placeholder -> a word that the code spells out; `OWN` for others, which code fills in."""
OWN = "0"
NO_METRICS = {"tokens/s", "time/sft", "throughput/sft_tokens_per_s", "throughput/sft_model_tflops_per_s"}
"""A unit, and what `sft_metrics` renames."""
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
    if name in plain or name in ("", OWN):
        return True
    found = (pattern.fullmatch(name) for pattern in patterns if depth)
    return any(all(written(part, depth - 1) for part in match.groups()) for match in found if match)


def example(row: str) -> str:
    return PLACEHOLDER.sub(lambda match: PARTS.get(match[1], OWN), row)


def test_every_row_is_written_by_some_code() -> None:
    assert len(ROWS) > 200
    assert [row for row in ROWS if not written(example(row))] == []
    assert not any(written(f"{example(row)}_zyx") for row in ROWS if not row.endswith(">"))


def test_every_metric_that_code_names_has_a_row() -> None:
    known = re.compile("|".join(PLACEHOLDER.sub("[^/]+", re.escape(row)) for row in ROWS if row != "reward/<name>"))
    groups = {row.partition("/")[0] for row in ROWS}
    plain, _ = strings()
    named = {name for name in plain if re.fullmatch(r"\w+(/[\w@]+)+", name) and name.partition("/")[0] in groups}
    assert len(named) > 100
    assert sorted(name for name in named - NO_METRICS if not known.fullmatch(name.removesuffix("_cpu"))) == []


def test_every_column_of_positions_has_a_row() -> None:
    assert {name for name in NAMES if "/" not in name} == set(COLUMNS)


def test_no_metric_has_two_rows() -> None:
    assert len(NAMES) == len(set(NAMES))
