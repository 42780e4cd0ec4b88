"""Charts are valid Vega-Lite: they draw what they were given, in the colours of the theme, as files."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.report.charts import (
    DASHED,
    MOST,
    Axis,
    Chart,
    Curve,
    ReferenceLine,
    curves,
    for_file,
    for_page,
    kept,
    save_charts,
    stacked,
)
from ctpo_megatron.report.figures import smoothed
from ctpo_megatron.report.page import bundle, chart_json
from ctpo_megatron.report.theme import LIGHT

vl_convert = pytest.importorskip("vl_convert")
STEPS = Axis("RL step", whole=True)


def vega(spec: dict[str, Any]) -> dict[str, Any]:
    """The compiled specification; raises ValueError where Vega-Lite does not take it."""
    found: dict[str, Any] = vl_convert.vegalite_to_vega(for_file(Chart("name", "Title", "Caption.", spec)))
    return found


def drawn(spec: dict[str, Any]) -> str:
    svg: str = vl_convert.vegalite_to_svg(for_file(Chart("name", "Title", "Caption.", spec)))
    return svg


def paths(svg: str, mark: str) -> list[str]:
    """Outlines of the marks of this type, without the grid."""
    groups = re.findall(rf'<g class="mark-{mark} role-mark[^>]*>(.*?)</g>', svg)
    return [path for group in groups for path in re.findall(r' d="([^"]+)"', group)]


def test_a_curve_has_a_line_through_its_points_and_a_band_around_them() -> None:
    band = Curve("a", [1, 2, 3], [0.1, 0.5, 0.7], low=[0.0, 0.4, 0.6], high=[0.2, 0.6, 0.8])
    svg = drawn(curves([band, Curve("b", [1, 2], [0.2, 0.1], "orange")], STEPS, Axis("share", 0, 1)))
    lines, areas = paths(svg, "line"), paths(svg, "area")
    assert [path.count("L") for path in lines] == [2, 1] and [path.count("L") for path in areas] == [5]
    assert LIGHT["blue"] in svg and LIGHT["orange"] in svg and "RL step" in svg and "share" in svg


def test_what_belongs_to_a_curve_is_in_its_colour_and_not_in_the_legend() -> None:
    spec = curves([Curve("mean", [1, 2], [1, 2], "green"), Curve("seed 1", [1, 2], [1, 3], of="mean")], STEPS, STEPS)
    svg = drawn(spec)
    assert len(paths(svg, "line")) == 2 and "seed 1" not in svg and LIGHT["blue"] not in svg
    assert spec["encoding"]["color"]["legend"] is None


def test_a_page_has_the_values_of_all_series_under_the_pointer() -> None:
    """Of its own legend they are drawn without; the mean of runs is told, and not each run."""
    series = [Curve("a", [1, 2], [1, 1 / 7]), Curve("a 1", [1, 2], [1, 3], of="a"), Curve("b", [1], [2], "red", DASHED)]
    chart = Chart("name", "Title", "Caption.", curves(series, STEPS, STEPS))
    assert chart.legend == [("a", "var(--blue)", "solid"), ("b", "var(--red)", "dashed")]
    found = vl_convert.vegalite_to_vega(for_page(chart))
    pivots = [step for data in found["data"] for step in data.get("transform", []) if step["type"] == "pivot"]
    assert [(pivot["field"], pivot["groupby"]) for pivot in pivots] == [("series", ["RL step"])]
    assert not found.get("legends") and found["description"] == "Caption."
    assert for_page(chart)["data"]["values"] == [
        {"series": "a", "member": None, "x": [1, 2], "y": [1, 0.1429]},
        {"series": "a", "member": "a 1", "x": [1, 2], "y": [1, 3]},
        {"series": "b", "member": None, "x": [1], "y": [2]},
    ]
    lines = re.findall(r'<g class="mark-line role-mark[^>]*>(.*?)</g>', vl_convert.vegalite_to_svg(for_page(chart)))
    assert [line.count("<path") for line in lines] == [1, 1, 1]
    assert vega(chart.spec)["legends"]


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    spec = curves([Curve("a", [0, 1, 2, 3], [1, 0, 10, math.nan])], STEPS, Axis("nats", log=True))
    assert [row["x"] for row in spec["data"]["values"]] == [0, 2]
    assert curves([Curve("a", [0], [1])], Axis("t", log=True), STEPS)["data"]["values"] == []
    drawn(spec)


def test_reference_rules_are_named() -> None:
    svg = drawn(curves([Curve("a", [1, 2], [1, 2])], STEPS, STEPS, [ReferenceLine(1.5, "limit")]))
    assert ">limit<" in svg and LIGHT["red"] in svg


@pytest.mark.parametrize(("steps", "mark"), [(20, "rect"), (200, "area")])
def test_parts_are_stacked(steps: int, mark: str) -> None:
    xs = list(range(1, steps + 1))
    spec = stacked([Curve("a", xs, [1.0] * steps), Curve("b", xs, [2.0] * steps, "red")], STEPS, Axis("seconds", 0))
    assert len(paths(drawn(spec), mark)) == (2 * steps if mark == "rect" else 2)
    stack = [step for data in vega(spec)["data"] for step in data.get("transform", []) if step["type"] == "stack"]
    assert stack and stack[0]["sort"]["field"] == ["order"]


def test_nothing_at_all_can_be_drawn() -> None:
    for make in (curves, stacked):
        drawn(make([], STEPS, Axis("y", log=True)))


def test_a_long_legend_takes_nothing_from_the_plot() -> None:
    def height(count: int) -> float:
        """Of a line from the lowest to the highest value."""
        series = [Curve(f"the label of series {number}", [1, 2], [0.0, 1.0]) for number in range(count)]
        line = paths(drawn(curves(series, STEPS, Axis("share", 0, 1))), "line")[0]
        return abs(float.__sub__(*(float(y) for y in re.findall(r",(-?[\d.]+)", line))))

    assert height(9) == pytest.approx(height(2), rel=0.12)


def test_files_of_all_formats(tmp_path: Path) -> None:
    chart = Chart("reward", "The title", "Caption.", curves([Curve("a", [1, 2], [1, 2])], STEPS, STEPS))
    written = save_charts([chart], tmp_path / "new")
    assert [path.name for path in written] == ["reward.png", "reward.svg", "reward.pdf"]
    assert [path.read_bytes()[:4] for path in written] == [b"\x89PNG", b"<svg", b"%PDF"]
    assert "var(--" not in (svg := written[1].read_text()) and "The title" not in svg and 'width="244"' in svg
    assert "theme" not in json.dumps(chart.spec) and "config" not in chart.spec


def test_text_of_a_run_cannot_end_the_script() -> None:
    spec = curves([Curve("</script><b>", [1], [1])], Axis("x"), Axis("y"))
    text = chart_json([Chart("c", "t", "<!--", spec)])
    assert "<" not in text and json.loads(text)["charts"]["c"]["description"] == "<!--"


def test_thinning_keeps_every_peak() -> None:
    values = [0.0] * 10_000
    values[3333], values[7777] = 5.0, -5.0
    places = kept(values)
    assert {0, 3333, 7777, 9999} <= {*places} and len(places) <= MOST + 2 and places == sorted(places)
    assert kept(values[:MOST]) == [*range(MOST)]


def test_smoothing_is_a_mean_around_each_value() -> None:
    assert smoothed([1.0] * 99) is None
    line = [float(n) for n in range(400)]
    assert smoothed(line) == pytest.approx(line)  # the ends are not bent
    noisy = smoothed([n % 2 for n in range(1600)])
    assert noisy is not None and all(0.45 < value < 0.55 for value in noisy[50:-50])


def test_the_bundle_is_kept_and_made_again_where_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def make() -> bytes:
        made.append(1)
        return gzip.compress(b"window.vegaEmbed = 1;")

    monkeypatch.setattr("ctpo_megatron.report.page._made_bundle", make)
    assert bundle() == bundle() and len(made) == 1
    (path,) = (tmp_path / "ctpo-megatron").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert gzip.decompress(base64.b64decode(bundle())) == b"window.vegaEmbed = 1;" and len(made) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a file: no folder can be made in it
    assert bundle() and len(made) == 3
