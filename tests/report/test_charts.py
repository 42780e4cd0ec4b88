"""Charts are valid Vega-Lite: they draw what they were given, in the colours of the theme, as files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.report.charts import (
    Axis,
    Chart,
    Curve,
    ReferenceLine,
    bars,
    curves,
    cycled,
    for_file,
    points,
    save_charts,
    stacked,
)
from ctpo_megatron.report.theme import CYCLE, DARK, LIGHT, coloured

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


def test_what_belongs_to_a_hidden_curve_is_hidden() -> None:
    """And a marked x is drawn on the curve that is left."""
    series = [Curve("a", [1, 2], [1, 2]), Curve("a 1", [1, 2], [1, 3], of="a"), Curve("b", [1, 2], [2, 2], "red")]
    spec = curves(series, STEPS, STEPS)
    assert (len(paths(drawn(spec), "line")), len(paths(drawn(spec), "symbol"))) == (3, 4)
    spec |= {"params": [{"name": "hidden", "value": ["a"]}, {"name": "at", "value": 2}]}
    svg = vl_convert.vegalite_to_svg(coloured(spec, LIGHT))
    assert (len(paths(svg, "line")), len(paths(svg, "symbol"))) == (1, 2 + 1)


def test_a_log_axis_leaves_out_what_it_cannot_show() -> None:
    spec = curves([Curve("a", [0, 1, 2, 3], [1, 0, 10, math.nan])], STEPS, Axis("nats", log=True))
    assert [row["x"] for row in spec["data"]["values"]] == [0, 2]
    assert points([Curve("a", [0], [1])], [], Axis("t", log=True), STEPS)["data"]["values"] == []
    drawn(spec)


def test_reference_rules_are_named() -> None:
    svg = drawn(curves([Curve("a", [1, 2], [1, 2])], STEPS, STEPS, [ReferenceLine(1.5, "limit")]))
    assert ">limit<" in svg and LIGHT["red"] in svg


def test_points_with_the_curve_that_was_fitted() -> None:
    measured, fitted = Curve("a", [1, 10, 100], [1, 3, 11]), Curve("a", [1, 100], [1, 10])
    svg = drawn(points([measured], [fitted], Axis("t", log=True), Axis("std", log=True)))
    assert len(paths(svg, "symbol")) == 3 and [path.count("L") for path in paths(svg, "line")] == [1]


@pytest.mark.parametrize(("steps", "mark"), [(20, "rect"), (200, "area")])
def test_parts_are_stacked(steps: int, mark: str) -> None:
    xs = list(range(1, steps + 1))
    spec = stacked([Curve("a", xs, [1.0] * steps), Curve("b", xs, [2.0] * steps, "red")], STEPS, Axis("seconds", 0))
    assert len(paths(drawn(spec), mark)) == (2 * steps if mark == "rect" else 2)
    stack = [step for data in vega(spec)["data"] for step in data.get("transform", []) if step["type"] == "stack"]
    assert stack and stack[0]["sort"]["field"] == ["place"]


def test_bars_meet_halfway_between_their_places() -> None:
    spec = bars([Curve("n", [1, 10, 100], [3, 2, 1])], Axis("t", log=True), STEPS)
    ends = [(row["start"], row["end"]) for row in spec["data"]["values"]]
    assert (
        ends[0][1] == pytest.approx(math.sqrt(10)) == pytest.approx(ends[1][0]) and len(paths(drawn(spec), "rect")) == 3
    )


def test_nothing_at_all_can_be_drawn() -> None:
    for make in (curves, stacked, bars):
        drawn(make([], STEPS, Axis("y", log=True)))
    drawn(points([], [], STEPS, STEPS))


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


def test_colours_have_names_on_light_and_dark_pages() -> None:
    assert LIGHT.keys() == DARK.keys() and set(CYCLE) <= LIGHT.keys()
    nine = cycled([Curve(str(n), [1], [1]) for n in range(9)])
    assert [curve.colour for curve in nine] == [*CYCLE, CYCLE[0]]
    with pytest.raises(KeyError, match="pink"):
        drawn(curves([Curve("a", [1], [1], "pink")], STEPS, STEPS))
