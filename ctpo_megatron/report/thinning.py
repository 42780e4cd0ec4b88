"""Fewer points of a curve: what a chart a few hundred pixels wide can show."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 400
"""Points of a curve that are kept."""
_SMOOTHED_FROM = 100


def kept(values: Sequence[float], most: int = MOST) -> list[int]:
    """Places of the values to keep: of each interval the smallest and the largest, so that peaks stay."""
    if len(values) <= most:
        return list(range(len(values)))
    stride = -(-2 * len(values) // most)
    places = {0, len(values) - 1}
    for start in range(0, len(values), stride):
        interval = range(start, min(start + stride, len(values)))
        places |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return sorted(places)


def smoothed(values: Sequence[float]) -> list[float] | None:
    """Means over a window around each value, a fortieth of all wide; None for fewer than 100 values."""
    count = len(values)
    if count < _SMOOTHED_FROM:
        return None
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for place in range(count):
        half = min(count // 80, place, count - 1 - place)  # symmetric: the ends are not bent
        means.append((sums[place + half + 1] - sums[place - half]) / (2 * half + 1))
    return means
