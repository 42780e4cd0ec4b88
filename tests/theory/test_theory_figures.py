"""The figures of `ctpo theory` have the numbers of its tables, and files that open."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from ctpo_megatron.theory import StudySettings, study, write_study
from ctpo_megatron.theory.figures import charts
from ctpo_megatron.theory.random_walk import TOKENS
from ctpo_megatron.theory.study import Study


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


def test_files_open(found: Study, tmp_path: Path) -> None:
    written = write_study(found, tmp_path)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == set(written)
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert min(picture.size) > 400 and len(picture.convert("L").getcolors(256) or ()) > 8
        elif path.suffix == ".svg":
            text = " ".join(ElementTree.parse(path).getroot().itertext())
            assert "position t" in text and ("token" in text or "sampled tokens" in text)
        elif path.suffix == ".pdf":
            assert path.read_bytes().startswith(b"%PDF-") and path.stat().st_size > 2_000
