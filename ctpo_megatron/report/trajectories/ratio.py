"""The ratio of the objective over the tokens of a trajectory: its points, its chart."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ctpo_megatron.report.axes import Axis
from ctpo_megatron.report.charts import Curve, Spec, curves
from ctpo_megatron.report.ratio_names import RatioQuantity
from ctpo_megatron.report.theme import variable
from ctpo_megatron.tracking import Record

WINDOW = ("log_ratio", "clip_low", "clip_high")
"""Fields of a record: the ratio of the objective, and its window."""
MOST_POINTS = 320
"""Of a chart: more could not be seen, and every trajectory of the page would weigh as much."""

Point = tuple[int, float, float | None, float | None]
"""Number of the model token from 1, log-ratio, and the window; None: no bound."""


def ratio_points(record: Record) -> list[Point] | None:
    """The curve over the model tokens, thinned so that peaks are kept; None without the data.

    `log_ratio`, `clip_low` and `clip_high` are per-token lists of the dump (see `write_trajectories`).
    """
    size = len(record["token_ids"])
    if any(len(record.get(name) or ()) != size for name in WINDOW):
        return None
    by_model = [index for index in range(size) if record["response_mask"][index]]
    numbers = {index: number for number, index in enumerate(by_model, start=1)}
    values = record["log_ratio"]
    if len(by_model) < 2 or not all(_finite(values[index]) for index in by_model):
        return None
    lows, highs = record["clip_low"], record["clip_high"]
    return [
        (numbers[index], _rounded(values[index]), _bound(lows[index]), _bound(highs[index]))
        for index in _thin(by_model, values, MOST_POINTS)
    ]


def ratio_spec(quantity: RatioQuantity) -> Spec:
    """The chart of any trajectory, without data: rows have x, y, low, high, and `outside` for a clipped ratio."""
    example = Curve(quantity.name, [1, 2], [0.0, 0.0], low=[-1.0, -1.0], high=[1.0, 1.0])
    spec = curves([example], Axis("model token", whole=True), Axis(f"{quantity.name} (nats)"))
    del spec["$schema"]  # an address on the web, in a page that loads nothing
    spec |= {"data": {"values": []}, "height": 140}
    for layer in spec["layer"]:
        layer["mark"].pop("point", None)  # of every token they would hide the line
    outside = {"type": "point", "filled": True, "color": variable("red"), "opacity": 1}
    there = {"y": {"field": "y", "type": "quantitative"}, "color": {"value": variable("red")}}
    spec["layer"].append({"mark": outside, "encoding": there, "transform": [{"filter": "datum.outside"}]})
    return spec


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _bound(value: float | None) -> float | None:
    return _rounded(value) if value is not None and math.isfinite(value) else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _thin(indices: list[int], values: Sequence[float], most: int) -> list[int]:
    """At most `most` of the indices: of each interval the one with the largest value."""
    stride = -(-len(indices) // most) or 1
    return [
        max(indices[start : start + stride], key=lambda index: abs(values[index]))
        for start in range(0, len(indices), stride)
    ]
