"""Charts as Vega-Lite specifications, without theme: the report draws them on a page, `save_charts` writes files.

Rows of the data have `x`, `y` and `series`; `low` and `high` where there is a band. So pages can show what is under the
pointer. Parameters of a specification: `hidden` (names of series to leave out) and `at` (an x to mark).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.base.files import aside
from ctpo_megatron.report.theme import CONFIG, CYCLE, LIGHT, coloured, sizes, variable

_NUMBER = (
    "datum.value == 0 ? '0' : abs(datum.value) >= 1e4 ? format(datum.value, '~s') : "
    "abs(datum.value) < 1e-3 ? format(datum.value, '~e') : format(datum.value, '~r')"
)
"""Label of a tick: plain where that is short, thousands and powers of ten where not."""
_LOG_TICK = (
    "indexof(domain('CHANNEL')[1] / domain('CHANNEL')[0] < 300 ? [1, 2, 5] : [1], "
    "round(datum.value / pow(10, floor(log(datum.value) / LN10 + 1e-9)))) >= 0"
)
"""Which ticks of a log axis count: 1, 2, 5 over a short range, powers of ten over a long one."""

_ROOM = [{"expr": "height"}, 4]
"""Of a y axis: so that a point at the upper end is not cut off."""


@dataclass(frozen=True)
class Axis:
    """low, high: fixed ends; None: fitted to the data. whole: ticks at whole numbers only. base: of the logarithm."""

    title: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    whole: bool = False
    base: int = 10


def channel(field: str, axis: Axis, of: Literal["x", "y"] = "y") -> dict[str, Any]:
    """A field on this axis, as a channel of an encoding."""
    scale: dict[str, Any] = {"type": "log", "base": axis.base} if axis.log else {"zero": False}
    scale |= ({"nice": True, "range": _ROOM} if of == "y" else {"nice": False, "padding": 4}) | {
        f"domain{end}": value for end, value in (("Min", axis.low), ("Max", axis.high)) if value is not None
    }
    ticks: dict[str, Any] = {"tickCount": 5 if of == "y" else 6, "labelExpr": _NUMBER}
    if axis.log and axis.base == 10:
        shown = _LOG_TICK.replace("CHANNEL", of)
        ticks |= {"labelExpr": f"{shown} ? ({_NUMBER}) : ''", "labelOverlap": "greedy", "tickCount": 10}
        ticks["gridOpacity"] = {"condition": {"test": shown, "value": 1}, "value": 0}
    elif axis.whole:
        ticks["tickMinStep"] = 1
    return {"field": field, "type": "quantitative", "title": axis.title, "scale": scale, "axis": ticks}


Spec = dict[str, Any]
Format = Literal["png", "svg", "pdf"]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLUMN, HEIGHT, TEXT = 244, 150, 7.5
"""Width and height of a figure in a column of a paper, and its text; points."""
PIXELS_PER_INCH = 300
_FEW = 60
"""Up to this many points of a curve, each is marked."""
_AT = "datum.x === at"
SHOWN = {"filter": "indexof(hidden, datum.series) < 0"}
"""For layers with data of their own: leaves out what the parameter `hidden` names."""
_LEGEND = 52
"""Characters of a row of the legend in a column."""
_LONG_LINE = {"symbolSize": 190, "rowPadding": 0}
"""In a legend: long enough to show dashes."""


@dataclass(frozen=True)
class Chart:
    """name: of its file, and its id on a page. caption: one or two sentences, also read out in place of the chart.

    spec: a Vega-Lite specification with inline data, colours as `theme.variable` names them.
    """

    name: str
    title: str
    caption: str
    spec: Spec


@dataclass(frozen=True)
class Curve:
    """A series. x, y, low, high: numbers of equal length; `low` and `high` are a band around `y`.

    colour: a name of the theme. of: the label of another curve that this one belongs to, as one run of several, or as
    values that the other one smooths. It is drawn thin, in the colour of that one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "blue"
    dashed: bool = False
    dotted: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    of: str | None = None


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line with a name."""

    value: float
    label: str


def cycled(series: Iterable[Curve]) -> list[Curve]:
    """The curves in the colours of the theme, in order; curves `of` another take the colour of that one."""
    return [replace(curve, colour=CYCLE[place % len(CYCLE)]) for place, curve in enumerate(series)]


def curves(series: Sequence[Curve], x: Axis, y: Axis, rules: Sequence[ReferenceLine] = ()) -> Spec:
    """Lines over x with their bands. Points that a log axis cannot show are left out."""
    mains, thin = [c for c in series if c.of is None], [c for c in series if c.of is not None]
    rows = _rows(mains, x, y)
    layers: list[Spec] = []
    if any("low" in row for row in rows):
        layers.append(_layer({"type": "area", "opacity": 0.16, "clip": True}, y, {"y2": {"field": "high"}}, "low"))
    if thin:
        layers.append(_thin_layer(thin, x, y))
    few = all(len(curve.x) <= _FEW for curve in mains)
    layers.append(_layer({"type": "line", "clip": True, "point": few and {"filled": True}}, y, _dashes(mains)))
    spec = _spec(rows, mains, x, [*layers, *_rules(rules, y), *_marked(y)])
    if spec["encoding"]["color"]["legend"]:
        spec["encoding"]["color"]["legend"] |= _LONG_LINE
    return spec


def points(measured: Sequence[Curve], fitted: Sequence[Curve], x: Axis, y: Axis) -> Spec:
    """Points, each series with a curve fitted to it if `fitted` has one of the same label."""
    rows, lines = _rows(measured, x, y), _rows(fitted, x, y)
    layers = [_layer({"type": "line", "clip": True, "opacity": 0.6}, y) | {"data": {"values": lines}}] if lines else []
    layers.append(_layer({"type": "point", "filled": True, "clip": True}, y))
    return _spec(rows, measured, x, [*layers, *_marked(y)])


def stacked(parts: Sequence[Curve], x: Axis, y: Axis) -> Spec:
    """Parts of a whole over x, the first at the bottom: bars if there are few x, else areas. All have the same x."""
    rows = []
    for place, curve in enumerate(parts):
        rows += [row | {"place": place} for row in _rows([curve], x, y)]
    few = len({row["x"] for row in rows}) <= _FEW
    layer = _bars(rows, x, y, 0.8) if few else _layer({"type": "area", "clip": True, "strokeWidth": 0}, y)
    layer["encoding"]["y"]["stack"] = "zero"
    layer["encoding"]["order"] = {"field": "place", "type": "ordinal"}
    return _square(_spec(rows, parts, x, [layer, _rule_at()]))


def bars(heights: Sequence[Curve], x: Axis, y: Axis) -> Spec:
    """One bar for each x, from halfway to its neighbours; several series lie over each other."""
    rows = _rows(heights, x, y)
    layer = _bars(rows, x, y, 1.0)
    layer["encoding"]["y"]["stack"] = None
    layer["mark"]["opacity"] = 1 if len(heights) == 1 else 0.6
    return _square(_spec(rows, heights, x, [layer, _rule_at()]))


def save_charts(
    charts: Iterable[Chart],
    folder: Path,
    formats: Sequence[Format] = ("png", "svg", "pdf"),
    pixels_per_inch: float = PIXELS_PER_INCH,
) -> list[Path]:
    """Write `folder/<name>.<format>` of each chart, light, as wide as a column of a paper; returns the paths.

    PNG files have the title in the picture; in a paper the caption has it.
    """
    import vl_convert

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for chart in charts:
        for form in formats:
            spec = for_file(chart, titled=form == "png")
            if form == "png":
                content = vl_convert.vegalite_to_png(spec, ppi=pixels_per_inch)
            elif form == "pdf":
                content = vl_convert.vegalite_to_pdf(spec)
            else:
                content = vl_convert.vegalite_to_svg(spec).encode()
            path = folder / f"{chart.name}.{form}"
            with aside(path) as new:
                new.write_bytes(content)
            written.append(path)
    return written


def for_file(chart: Chart, titled: bool = False) -> Spec:
    """Its specification with light theme and the size of a column, white behind it, without what needs a pointer."""
    height = HEIGHT + _further_legend(chart.spec)
    spec = {"width": COLUMN, "height": height, "autosize": {"type": "fit", "contains": "padding"}} | still(chart.spec)
    spec |= {"$schema": SCHEMA, "config": file_config(), "description": chart.caption}
    if titled:
        spec["title"] = chart.title
    return coloured(spec, LIGHT)


def _further_legend(spec: Spec) -> float:
    """Points that the legend has beyond its first row, which must not be taken from the plot."""
    color = spec.get("encoding", {}).get("color", {})
    rows = math.ceil(len(color["scale"]["domain"]) / color["legend"]["columns"]) if color.get("legend") else 1
    return (rows - 1) * 1.6 * TEXT


def file_config() -> Spec:
    """Style of a file, white behind it; colours as variables."""
    config = {name: {**CONFIG.get(name, {}), **size} for name, size in sizes(TEXT).items()}
    return CONFIG | config | {"background": "white"}


def still(spec: Spec) -> Spec:
    """A specification without what needs a pointer; several of these can be parts of one."""
    layers = [
        {name: part for name, part in layer.items() if name != "params" and (name, part) != ("transform", [SHOWN])}
        for layer in spec.get("layer", ())
        if {"filter": _AT} not in layer.get("transform", ())
    ]
    rest = {name: part for name, part in spec.items() if name not in ("params", "transform")}
    return rest | {"layer": layers} if "layer" in spec else spec


def _rows(series: Iterable[Curve], x: Axis, y: Axis) -> list[dict[str, Any]]:
    rows = []
    for curve in series:
        band = None
        if curve.low is not None and curve.high is not None:
            band = list(zip(curve.low, curve.high, strict=True))
        for place, (at, value) in enumerate(zip(curve.x, curve.y, strict=True)):
            if not math.isfinite(value) or (y.log and value <= 0) or (x.log and at <= 0):
                continue
            row = {"x": at, "y": value, "series": curve.label}
            if band and all(math.isfinite(end) and (end > 0 or not y.log) for end in band[place]):
                row["low"], row["high"] = band[place]
            rows.append(row)
    return rows


def _spec(rows: list[dict[str, Any]], series: Sequence[Curve], x: Axis, layers: list[Spec]) -> Spec:
    labels = [curve.label for curve in series]
    colours = {"domain": labels, "range": [variable(curve.colour) for curve in series]}
    columns = max(1, _LEGEND // (4 + max(map(len, labels), default=1)))
    color: Spec = {
        "field": "series",
        "type": "nominal",
        "scale": colours,
        "legend": {"columns": columns},
    }
    if len(labels) < 2:
        color["legend"] = None
    for layer in layers:
        if "data" in layer:
            layer["transform"] = [SHOWN]
    layers[0]["params"] = [
        {
            "name": "zoom",
            # A wheel alone scrolls the page.
            "select": {"type": "interval", "zoom": "wheel![event.ctrlKey || event.metaKey || event.shiftKey]"},
            "bind": "scales",
        }
    ]
    return {
        "data": {"values": rows},
        "params": [{"name": "hidden", "value": []}, {"name": "at", "value": None}],
        "transform": [SHOWN],
        "encoding": {"x": channel("x", x, "x"), "color": color},
        "layer": layers,
    }


def _layer(mark: Spec, y: Axis, more: Spec | None = None, field: str = "y") -> Spec:
    return {"mark": mark, "encoding": {"y": channel(field, y), **(more or {})}}


def _dashes(series: Sequence[Curve]) -> Spec:
    if not any(curve.dashed or curve.dotted for curve in series):
        return {}
    dashes = [[1, 2] if curve.dotted else [4, 3] if curve.dashed else [1, 0] for curve in series]
    scale = {"domain": [curve.label for curve in series], "range": dashes}
    return {"strokeDash": {"field": "series", "type": "nominal", "scale": scale}}


def _thin_layer(series: Sequence[Curve], x: Axis, y: Axis) -> Spec:
    rows = []
    for curve in series:
        rows += [row | {"series": curve.of, "member": curve.label} for row in _rows([curve], x, y)]
    mark = {"type": "line", "clip": True, "opacity": 0.35, "strokeWidth": 0.8}
    shown = {"detail": {"field": "member"}, "tooltip": {"field": "member", "type": "nominal"}}
    return _layer(mark, y, shown) | {"data": {"values": rows}}


def _rules(rules: Sequence[ReferenceLine], y: Axis) -> list[Spec]:
    layers: list[Spec] = []
    for rule in rules:
        at = {"datum": rule.value, "type": "quantitative", "scale": channel("y", y)["scale"]}
        colour = {"value": variable("red")}
        line = {"type": "rule", "strokeDash": [4, 3], "clip": True}
        text = {"type": "text", "align": "right", "dx": -2, "dy": 2, "baseline": "top"}
        anywhere: Spec = {"data": {"values": [{}]}}
        layers.append(anywhere | {"mark": line, "encoding": {"x": None, "y": at, "color": colour}})
        place = {"x": {"value": "width"}, "y": at, "color": colour, "text": {"value": rule.label}}
        layers.append(anywhere | {"mark": text, "encoding": place})
    return layers


def _rule_at() -> Spec:
    """A vertical line at the marked x."""
    mark = {"type": "rule", "color": variable("axis"), "clip": True}
    found = [{"filter": _AT}, {"aggregate": [{"op": "count", "as": "n"}], "groupby": ["x"]}]
    return {"transform": found, "mark": mark, "encoding": {"color": None}}


def _marked(y: Axis) -> list[Spec]:
    points = _layer({"type": "point", "filled": True, "clip": True, "opacity": 1}, y)
    return [_rule_at(), points | {"transform": [{"filter": _AT}]}]


def _bars(rows: list[dict[str, Any]], x: Axis, y: Axis, share: float) -> Spec:
    """A layer of bars, each this share of the way to its neighbours; adds `start` and `end` to the rows."""
    places = sorted({math.log(row["x"]) if x.log else float(row["x"]) for row in rows})
    steps = [high - low for low, high in itertools.pairwise(places)] or [1.0]
    ends = {}
    for place, before, after in zip(places, [steps[0], *steps], [*steps, steps[-1]], strict=False):
        low, high = place - share * before / 2, place + share * after / 2
        ends[place] = (math.exp(low), math.exp(high)) if x.log else (low, high)
    for row in rows:
        row["start"], row["end"] = ends[math.log(row["x"]) if x.log else float(row["x"])]
    layer = _layer({"type": "bar", "clip": True, "strokeWidth": 0}, y)
    layer["encoding"] |= {"x": channel("start", x, "x") | {"bin": "binned"}, "x2": {"field": "end"}}
    return layer


def _square(spec: Spec) -> Spec:
    """With areas in the legend instead of lines."""
    if spec["encoding"]["color"]["legend"]:
        spec["encoding"]["color"]["legend"] |= {"symbolType": "square", "symbolStrokeWidth": 0}
    return spec
