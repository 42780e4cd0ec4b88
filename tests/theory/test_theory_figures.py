"""Tables and figures have the numbers that are computed, for any size of tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from theory_tables import SHOWN, Table, bias_table, clip_figure, clip_table, position_figure, variance_table
from theory_tree import RATIOS, Tree
from theory_walk import CURVE, TOKENS, simulated

SIGMA, WALKS = 0.0387, 200


def drawn(rows: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Series -> its points."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row.get("member", row["series"]), []).append((row["x"], row["y"]))
    return series


@pytest.mark.parametrize(("vocabulary", "horizon"), [(3, 4), (2, 6)])
def test_curves_by_position_are_the_columns_of_the_table(vocabulary: int, horizon: int) -> None:
    rng = np.random.default_rng(0)
    tree = Tree.random(rng, vocabulary, horizon, 0.7)
    table = bias_table(tree, tree.prefix_advantages(rng))
    assert table.column("t") == list(range(1, horizon + 1))
    assert max(table.column("CTPO, prefix")) < 1e-12 < 0.01 < table.column("token")[-1]
    figure = position_figure(table, list(RATIOS.values()), "relative bias", "Caption.")
    series = drawn(figure.spec["data"]["values"])
    assert list(series) == list(RATIOS.values())
    for name, points in series.items():
        assert points == list(zip(table.column("t"), table.column(name), strict=True))
    assert repr(figure).startswith("Caption.\ntoken: 1 0, 2 0.")


def test_variance_has_a_log_axis() -> None:
    table = variance_table(Tree.random(np.random.default_rng(0), 3, 4, 0.7))
    figure = position_figure(table, ["prefix", "sequence"], "variance", "Caption.", log=True)
    assert figure.spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"


@pytest.fixture(scope="module")
def rates() -> Table:
    rng = np.random.default_rng(0)
    return clip_table(simulated(rng, WALKS, SIGMA), rng.random(WALKS) < 0.5, SIGMA)


@pytest.mark.parametrize("window", ["widening", "fixed"])
def test_clip_rates_have_formulas_as_lines_and_walks_as_points(window: str, rates: Table) -> None:
    spec = clip_figure(rates, window).spec
    found = drawn(spec["data"]["values"])
    lines = {name.removesuffix(", line"): points for name, points in found.items() if name.endswith(", line")}
    walks = {name: points for name, points in found.items() if not name.endswith(", line")}
    marks = [(layer["mark"]["type"], layer["transform"]) for layer in spec["layer"]]
    assert marks == [("line", [{"filter": "datum.member"}]), ("point", [{"filter": "!datum.member"}])]
    assert set(walks) == {*lines, TOKENS} != set(lines)
    for kind, points in walks.items():
        rows = [row[2:5] for row in rates.rows if row[:2] == (window, kind)]
        assert points == [(t, simulated) for t, _, simulated in rows] and len(points) == len(CURVE)
        if kind in lines:
            assert lines[kind] == [(t, formula) for t, formula, _ in rows]


def test_rows_are_chosen_by_a_cell(rates: Table) -> None:
    few = rates.only("t", SHOWN)
    assert few.columns == rates.columns and len(few.rows) == 2 * 3 * len(SHOWN)
    assert set(few.column("t")) == set(SHOWN) and set(few.rows) < set(rates.rows)


def test_numbers_are_shown_as_a_reader_wants_them() -> None:
    table = Table.of({"name": ["a", ""], "x": np.array([8_000, 2]), "y": [0.25, -3e-14], "z": [-2.5e-5, 1_234.5]})
    assert repr(table).splitlines() == [
        "| name | x | y | z |",
        "| --- | --: | --: | --: |",
        "| a | 8,000 | 0.2500 | -2.5e-05 |",
        "|  | 2 | 0 | 1,234.5000 |",
    ]
