"""Credit by turn: the tables of docs/theory.md are those that the code computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from theory_study import StudySettings
from theory_tables import TheoryTable
from theory_turns import turn_tables

ROUNDING = 1e-14


@pytest.fixture(scope="module")
def tables() -> dict[str, TheoryTable]:
    """As the study makes them by default."""
    settings = StudySettings()
    rng = np.random.default_rng(settings.seed).spawn(5)[-1]
    found = turn_tables(rng, settings.vocabulary, settings.horizon, settings.shift)
    return {table.name: table for table in found}


def rows_below(heading: str) -> list[list[str]]:
    """The cells of the table whose header starts with `heading`."""
    lines = Path("docs/theory.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.mark.parametrize(
    ("name", "heading"), [("turn_credit", "ratio of a turn's reward"), ("turn_baselines", "baseline")]
)
def test_the_document_has_the_table_that_is_computed(tables: dict[str, TheoryTable], name: str, heading: str) -> None:
    written, computed = rows_below(heading), tables[name].rows
    assert [row[0] for row in written] == [row[0] for row in computed]
    for row, expected in zip(written, computed, strict=True):
        assert len(row) == len(expected)
        for cell, value in zip(row[1:], expected[1:], strict=True):
            if cell == "0":
                assert abs(float(value)) < ROUNDING, (row, expected)
            else:
                assert f"{float(value):.2f}".replace("0.", ".", 1) == cell, (row, expected)


def test_ratios_rank_as_the_theory_says(tables: dict[str, TheoryTable]) -> None:
    biases = dict(
        zip(tables["turn_credit"].column("ratio of a turn's reward"), tables["turn_credit"].rows, strict=True)
    )
    unbiased = [name for name, row in biases.items() if float(row[2]) < ROUNDING]
    assert unbiased == ["turn-end: up to the end of the turn that earned", "sequence"]
