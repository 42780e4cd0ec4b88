"""Axes of charts: scale, ends, ticks and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
