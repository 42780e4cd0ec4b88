"""Charts as Vega-Lite specifications: the report draws them on a page, `save_charts` writes files.

Rows of the data have `x`, `y` and `series`; `low` and `high` where there is a band; `member` where the row is of a
curve that belongs to the series. Colours are `var(--name)`: a page has a style for them, files get `LIGHT`.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.base.files import aside
from ctpo_megatron.report.theme import CONFIG, CYCLE, LIGHT, sizes

Spec = dict[str, Any]
Format = Literal["png", "svg", "pdf"]
Dash = tuple[int, int]
SOLID, DASHED, DOTTED = (1, 0), (4, 3), (1, 2)
"""Lengths of strokes and of the gaps between them."""
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
COLUMN, HEIGHT, TEXT = 244, 150, 7.5
"""Width and height of a figure in a column of a paper, and its text; points."""
PIXELS_PER_INCH = 300
_FEW = 60
"""Up to this many points of a curve, each is marked."""
_LEGEND = 52
"""Characters of a row of the legend in a column."""
MOST = 400
"""Points of a curve that are kept."""
_DIGITS = 4
"""Of the values on a page."""
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
"""Range of a y axis: so that a point at the upper end is not cut off."""
_VARIABLE = re.compile(r"var\(--(\w+)\)")


@dataclass(frozen=True)
class Axis:
    """low, high: fixed ends; None: fitted to the data. whole: ticks at whole numbers only."""

    title: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    whole: bool = False

    def channel(self, field: str, of: Literal["x", "y"]) -> Spec:
        """Return a field on this axis, as a channel of an encoding."""
        scale: Spec = {"type": "log"} if self.log else {"zero": False}
        scale |= {"nice": True, "range": _ROOM} if of == "y" else {"nice": False, "padding": 4}
        ends = {"domainMin": self.low, "domainMax": self.high}
        scale |= {name: value for name, value in ends.items() if value is not None}
        ticks: Spec = {"tickCount": 5 if of == "y" else 6, "labelExpr": _NUMBER}
        if self.log:
            counts = _LOG_TICK.replace("CHANNEL", of)
            ticks |= {"labelExpr": f"{counts} ? ({_NUMBER}) : ''", "labelOverlap": "greedy", "tickCount": 10}
            ticks["gridOpacity"] = {"condition": {"test": counts, "value": 1}, "value": 0}
        elif self.whole:
            ticks["tickMinStep"] = 1
        return {"field": field, "type": "quantitative", "title": self.title, "scale": scale, "axis": ticks}


@dataclass(frozen=True)
class Chart:
    """name: of its file, and its id on a page. caption: one or two sentences, also read out in place of the chart.

    spec: a Vega-Lite specification with inline data, without sizes and style.
    """

    name: str
    title: str
    caption: str
    spec: Spec

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """Label, colour and CSS style of the line of each series."""
        encoding = self.spec["encoding"]
        styles = {SOLID: "solid", DASHED: "dashed", DOTTED: "dotted"}
        colours, dashes = encoding["color"]["scale"], encoding["strokeDash"]["scale"]["range"]
        return [
            (label, colour, styles[dash])
            for label, colour, dash in zip(colours["domain"], colours["range"], dashes, strict=True)
        ]


@dataclass(frozen=True)
class Curve:
    """A series. x, y, low, high: numbers of equal length; `low` and `high` are a band around `y`.

    colour: a name of the theme. of: the label of another curve that this one belongs to: one run of several, values
    that the other one smooths, or a fit. It is drawn thin, in the colour of that one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "blue"
    dash: Dash = SOLID
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    of: str | None = None

    def rows(self, x: Axis, y: Axis) -> list[Spec]:
        """Return its points as rows of the data, without those that a log axis cannot show."""
        nothing = [math.nan] * len(self.y)
        band = zip(self.low or nothing, self.high or nothing, strict=True)
        found = []
        for at, value, ends in zip(self.x, self.y, band, strict=True):
            if not math.isfinite(value) or (y.log and value <= 0) or (x.log and at <= 0):
                continue
            row = {"x": at, "y": value, "series": self.of or self.label}
            if all(math.isfinite(end) and (end > 0 or not y.log) for end in ends):
                row["low"], row["high"] = ends
            found.append(row | ({"member": self.label} if self.of else {}))
        return found


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal line with a name."""

    value: float
    label: str


def cycled(series: Iterable[Curve]) -> list[Curve]:
    """Return the curves in the colours of the theme, in order."""
    return [replace(curve, colour=CYCLE[index % len(CYCLE)]) for index, curve in enumerate(series)]


def curves(
    series: Sequence[Curve], x: Axis, y: Axis, rules: Sequence[ReferenceLine] = (), *, joined: bool = True
) -> Spec:
    """Draw lines over x with their bands. joined: whether lines connect the points; else they alone are drawn."""
    rows = [row for curve in series for row in curve.rows(x, y)]
    main, thin = {"filter": "!datum.member"}, {"filter": "datum.member"}
    layers: list[Spec] = []
    if any("low" in row for row in rows):
        band = {"y": y.channel("low", "y"), "y2": {"field": "high"}, "detail": {"field": "member"}, "strokeDash": None}
        drawn = {"filter": "isValid(datum.low)"}
        layers.append({"mark": {"type": "area", "opacity": 0.16, "clip": True}, "encoding": band, "transform": [drawn]})
    vertical = {"y": y.channel("y", "y")}
    if any("member" in row for row in rows):
        mark = {"type": "line", "clip": True, "opacity": 0.35 if joined else 0.6, "strokeWidth": 0.8 if joined else 1.2}
        member = {"detail": {"field": "member"}, "tooltip": {"field": "member", "type": "nominal"}}
        layers.append({"mark": mark, "encoding": vertical | member, "transform": [thin]})
    few = all(len(curve.x) <= _FEW for curve in series if curve.of is None)
    line = {"type": "line", "clip": True, "point": few and {"filled": True}}
    mark = line if joined else {"type": "point", "filled": True, "clip": True}
    layers.append({"mark": mark, "encoding": vertical, "transform": [main]})
    return _spec(rows, series, x, [*layers, *(layer for rule in rules for layer in _rule(rule, y))])


def stacked(parts: Sequence[Curve], x: Axis, y: Axis) -> Spec:
    """Draw parts of a whole over x, the first at the bottom: bars if there are few x, else areas."""
    rows = [row | {"order": index} for index, part in enumerate(parts) for row in part.rows(x, y)]
    over = sorted({row["x"] for row in rows})
    vertical = y.channel("y", "y") | {"stack": "zero"}
    encoding: Spec = {"y": vertical, "order": {"field": "order", "type": "ordinal"}, "strokeDash": None}
    mark: Spec = {"type": "area", "clip": True, "strokeWidth": 0}
    if len(over) <= _FEW:
        half = 0.4 * min((after - before for before, after in itertools.pairwise(over)), default=1)
        rows = [row | {"start": row["x"] - half, "end": row["x"] + half} for row in rows]
        mark["type"] = "bar"
        encoding |= {"x": x.channel("start", "x") | {"bin": "binned"}, "x2": {"field": "end"}}
    spec = _spec(rows, parts, x, [{"mark": mark, "encoding": encoding}])
    for channel in ("color", "strokeDash"):
        if legend := spec["encoding"][channel]["legend"]:
            legend |= {"symbolType": "square", "symbolStrokeWidth": 0}
    return spec


def kept(values: Sequence[float]) -> list[int]:
    """Return the indices to keep: of each interval the smallest and the largest value, so that peaks stay."""
    if len(values) <= MOST:
        return list(range(len(values)))
    stride = -(-2 * len(values) // MOST)
    chosen = {0, len(values) - 1}
    for start in range(0, len(values), stride):
        interval = range(start, min(start + stride, len(values)))
        chosen |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return sorted(chosen)


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
    """Return its specification with light theme and the size of a column, white behind it."""
    # What the legend has beyond its first row must not be taken from the plot.
    color = chart.spec["encoding"]["color"]
    rows = math.ceil(len(color["scale"]["domain"]) / color["legend"]["columns"]) if color["legend"] else 1
    height = HEIGHT + (rows - 1) * 1.6 * TEXT
    spec = {"width": COLUMN, "height": height, "autosize": {"type": "fit", "contains": "padding"}} | chart.spec
    spec |= {"$schema": SCHEMA, "config": style(TEXT) | {"background": "white"}, "description": chart.caption}
    if titled:
        spec["title"] = chart.title
    # Raises KeyError for a name that the theme does not have.
    found: Spec = json.loads(_VARIABLE.sub(lambda name: LIGHT[name[1]], json.dumps(spec)))
    return found


def style(text: float) -> Spec:
    """Return the style of all charts for a text size, in points of a file or pixels of a page."""
    return CONFIG | {name: {**CONFIG.get(name, {}), **size} for name, size in sizes(text).items()}


def for_page(chart: Chart) -> Spec:
    """Return its specification with the values of all series at the x under the pointer, and without a legend."""
    encoding = chart.spec["encoding"]
    title = encoding["x"]["title"]
    nearest = {"type": "point", "fields": [title], "nearest": True, "on": "pointerover", "clear": "pointerout"}
    pointed = {
        "transform": [
            {"filter": "!datum.member"},
            {"calculate": "datum.x", "as": title},
            {"pivot": "series", "value": "y", "groupby": [title]},
        ],
        "params": [{"name": "pointed", "select": nearest}],
        "mark": {"type": "rule", "tooltip": {"content": "data"}, "color": "var(--axis)"},
        "encoding": {
            "x": encoding["x"] | {"field": title},
            "color": None,
            "strokeDash": None,
            "opacity": {"condition": {"param": "pointed", "empty": False, "value": 1}, "value": 0},
        },
    }
    plain = encoding | {name: encoding[name] | {"legend": None} for name in ("color", "strokeDash")}
    layers = {"encoding": plain, "layer": [*chart.spec["layer"], pointed]}
    return chart.spec | layers | _by_curve(chart.spec["data"]["values"]) | {"description": chart.caption}


def _by_curve(rows: Sequence[Spec]) -> Spec:
    """Return rows as a list of numbers for each curve, of few digits: a third of the room."""
    names = [name for name in ("x", "y", "low", "high", "start", "end", "order") if any(name in row for row in rows)]

    def column(name: str, points: Sequence[Spec]) -> list[float | None]:
        found = [point.get(name) for point in points]
        if name not in ("y", "low", "high"):
            return found
        return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in found]

    lists = []
    for (series, member), group in itertools.groupby(rows, lambda row: (row["series"], row.get("member"))):
        points = [*group]
        lists.append({"series": series, "member": member} | {name: column(name, points) for name in names})
    return {"data": {"values": lists}, "transform": [{"flatten": names}] if names else []}


def _spec(rows: list[Spec], series: Sequence[Curve], x: Axis, layers: list[Spec]) -> Spec:
    mains = [curve for curve in series if curve.of is None]
    labels = [curve.label for curve in mains]
    columns = max(1, _LEGEND // (4 + max(map(len, labels), default=1)))
    # Long symbols, to show dashes.
    legend = {"columns": columns, "symbolSize": 190, "rowPadding": 0} if len(labels) > 1 else None
    colours = {"domain": labels, "range": [f"var(--{curve.colour})" for curve in mains]}
    dashes = {"domain": labels, "range": [curve.dash for curve in mains]}
    channels = {"color": colours, "strokeDash": dashes}
    shared = {
        name: {"field": "series", "type": "nominal", "scale": scale, "legend": legend and dict(legend)}
        for name, scale in channels.items()
    }
    return {"data": {"values": rows}, "encoding": {"x": x.channel("x", "x"), **shared}, "layer": layers}


def _rule(rule: ReferenceLine, y: Axis) -> list[Spec]:
    at = {"datum": rule.value, "type": "quantitative", "scale": y.channel("y", "y")["scale"]}
    fixed = {"y": at, "color": {"value": "var(--red)"}, "strokeDash": None}
    line = {"type": "rule", "strokeDash": DASHED, "clip": True}
    text = {"type": "text", "align": "right", "dx": -2, "dy": 2, "baseline": "top"}
    label = {"x": {"value": "width"}, "text": {"value": rule.label}}
    anywhere: Spec = {"data": {"values": [{}]}}
    return [
        anywhere | {"mark": line, "encoding": fixed | {"x": None}},
        anywhere | {"mark": text, "encoding": fixed | label},
    ]
