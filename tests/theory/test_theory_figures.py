"""The figures have the numbers of the tables, and can be drawn."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from vl_convert import vegalite_to_svg

from ctpo_megatron.report.charts import for_file
from theory_figures import charts
from theory_study import Study, StudySettings, study
from theory_walk import TOKENS


@pytest.fixture(scope="module")
def found() -> Study:
    return study(StudySettings(samples=200))


def drawn(rows: list[dict[str, object]]) -> dict[object, list[tuple[object, object]]]:
    """Series -> its points."""
    series: dict[object, list[tuple[object, object]]] = {}
    for row in rows:
        series.setdefault(row["series"], []).append((row["x"], row["y"]))
    return series


@pytest.mark.parametrize("name", ["bias", "outcome_bias_by_position", "variance"])
def test_curves_by_position_are_the_columns_of_the_table(name: str, found: Study) -> None:
    table = found.table(name)
    chart = {chart.name: chart for chart in charts(found)}[name]
    series = drawn(chart.spec["data"]["values"])
    assert {"token", "sequence"} < set(series) and len(series) >= 3
    for label, points in series.items():
        assert points == list(zip(table.column("t"), table.column(str(label)), strict=True))


def test_variance_has_a_log_axis(found: Study) -> None:
    spec = next(chart.spec for chart in charts(found) if chart.name == "variance")
    assert spec["layer"][0]["encoding"]["y"]["scale"]["type"] == "log"


@pytest.mark.parametrize("window", ["widening", "fixed"])
def test_clip_rates_have_formulas_as_lines_and_walks_as_points(window: str, found: Study) -> None:
    spec = {chart.name: chart for chart in charts(found)}[f"clip_rate_{window}"].spec
    marks = {layer["mark"]["type"]: layer for layer in reversed(spec["layer"])}
    lines, walks = drawn(marks["line"]["data"]["values"]), drawn(spec["data"]["values"])
    assert "data" not in marks["point"] and set(walks) == {*lines, TOKENS} != set(lines)
    for kind, points in walks.items():
        rows = [row[2:5] for row in found.curves.rows if row[:2] == (window, kind)]
        assert points == [(t, simulated) for t, _, simulated in rows]
        if kind in lines:
            assert lines[kind] == [(t, formula) for t, formula, _ in rows]


def test_they_are_drawn(found: Study) -> None:
    for chart in charts(found):
        text = " ".join(ElementTree.fromstring(vegalite_to_svg(for_file(chart))).itertext())
        assert "position t" in text and ("token" in text or "sampled tokens" in text)
