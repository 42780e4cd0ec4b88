"""Sums over tokens by their position t in the response, which merge exactly, and a histogram of log r. Without torch.

t counts the model tokens of a trajectory from 1, as in S_t (paper, section 3). The bins are the same for all runs, so
that files of different runs can be added and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SINGLE, _BINS_AN_OCTAVE, _WIDE = 16, 4, 48
BINS = _SINGLE + _WIDE
LAST_POSITIONS = (
    *range(1, _SINGLE + 1),
    *(math.floor(_SINGLE * 2 ** ((j + 1) / _BINS_AN_OCTAVE)) for j in range(_WIDE)),
)
"""Last position of each bin: 1 to 16 one by one, then four bins an octave; the last bin has all later positions."""

SIGNS = ("positive", "negative", "zero")
"""Of the advantage."""
COUNTS = (
    "n",
    "n_loss",
    "n_computed",
    "n_entropy",
    "clip_high",
    "clip_low",
    "clip_dual",
    "fixed_high",
    "fixed_low",
    "widening_high",
    "widening_low",
    "n_uncertain",
    "uncertain_high",
    "uncertain_low",
    "uncertain_dual",
)
SUMS = ("t", "S", "S2", "d", "d2", "r", "r2", "x", "x2", "entropy")
COLUMNS = COUNTS + SUMS
"""What is known of the tokens of a cell, a sign and a bin; docs/reference/metrics.md defines them."""
SIDES = ("high", "low", "dual")
AGES = 17
"""Weight versions that a token is behind the trainer: 0 to 15 one by one, and all larger ones together."""
SAMPLER_COLUMNS = ("n", "m", "m2", "M", "M2")
AGE_COLUMNS = ("n", "n_known", "m", "m2")
"""What is known of the trainer against the sampler: at the positions of a bin, and of the computed tokens of an age."""

_SMALLEST, _DECADES, _BINS_A_DECADE = 1e-6, 7, 64
_HALF = _DECADES * _BINS_A_DECADE
HISTOGRAM_BINS = 2 * _HALF + 1
"""Of log r: |log r| < 1e-6 in the middle, and 64 bins a decade on either side, the outer ones without an end."""


@dataclass(frozen=True)
class PositionStats:
    """Sums over tokens, float64; counts are exact to 2^53.

    cells: `[len(SIGNS), BINS, len(COLUMNS)]`. histogram: `[HISTOGRAM_BINS]`, of the objective's log r of computed loss
    tokens. shares: `[len(SIDES) + 1]`, the clipped share of the loss tokens of each trajectory, summed over
    trajectories, and the number of trajectories with loss tokens. sampler: `[BINS, len(SAMPLER_COLUMNS)]`, whatever
    the advantage. ages: `[AGES, len(AGE_COLUMNS)]`.
    """

    cells: NDArray[np.float64]
    histogram: NDArray[np.float64]
    shares: NDArray[np.float64]
    sampler: NDArray[np.float64]
    ages: NDArray[np.float64]

    @classmethod
    def empty(cls) -> PositionStats:
        """Of no token."""
        cells, shares = np.zeros((len(SIGNS), BINS, len(COLUMNS))), np.zeros(len(SIDES) + 1)
        sampler, ages = np.zeros((BINS, len(SAMPLER_COLUMNS))), np.zeros((AGES, len(AGE_COLUMNS)))
        return cls(cells, np.zeros(HISTOGRAM_BINS), shares, sampler, ages)

    def __add__(self, other: PositionStats) -> PositionStats:
        parts = ((getattr(each, part.name) for each in (self, other)) for part in fields(self))
        return PositionStats(*(ours + theirs for ours, theirs in parts))

    def record(self) -> dict[str, Any]:
        """Return a plain-JSON form: sign -> column -> numbers by bin up to the last with a token.

        Columns of zeros are left out. `histogram` has bin -> count, `sampler` and `ages` column -> numbers by bin or
        age. Sums have 14 significant digits, there 8; one that is not finite is None.
        """
        filled = np.flatnonzero(self.column("n").any(0))
        bins = int(filled[-1]) + 1 if filled.size else 0
        found: dict[str, Any] = {
            sign: {
                name: [_plain(value, name in COUNTS) for value in cells[:bins, place].tolist()]
                for place, name in enumerate(COLUMNS)
                if cells[:, place].any()
            }
            for sign, cells in zip(SIGNS, self.cells, strict=True)
        }
        counted = np.flatnonzero(self.histogram).tolist()
        found["histogram"] = {str(place): int(self.histogram[place]) for place in counted}
        return found | {"sampler": _rows(SAMPLER_COLUMNS, self.sampler), "ages": _rows(AGE_COLUMNS, self.ages)}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PositionStats:
        """Inverse of `record`, to the digits of it, but for the shares of trajectories; None is NaN."""
        found = cls.empty()
        for sign, cells in zip(SIGNS, found.cells, strict=True):
            for name, values in record[sign].items():
                cells[: len(values), COLUMNS.index(name)] = [math.nan if value is None else value for value in values]
        for place, count in record["histogram"].items():
            found.histogram[int(place)] = count
        for part, names, table in (("sampler", SAMPLER_COLUMNS, found.sampler), ("ages", AGE_COLUMNS, found.ages)):
            for name, values in record.get(part, {}).items():  # lines of version 0.2 have neither
                table[: len(values), names.index(name)] = [math.nan if value is None else value for value in values]
        return found

    def unlike(self, expected: PositionStats, tolerance: float) -> str:
        """Return the first that differs: the histogram, a count, or a sum by more than `tolerance` of the largest in
        its column; "" for nothing. Entropy, and the sampler, are left out where `expected` does not know them.
        """
        if not np.array_equal(self.histogram, expected.histogram):
            return "another histogram of log r"
        known = expected.column("n_entropy").any()
        columns = [(name, self.column(name), expected.column(name)) for name in COLUMNS]
        for part, names in (("sampler", SAMPLER_COLUMNS), ("ages", AGE_COLUMNS)) if expected.sampler.any() else ():
            pairs = zip(names, getattr(self, part).T, getattr(expected, part).T, strict=True)
            columns += [(f"{name} of {part}", ours, theirs) for name, ours, theirs in pairs]
        for name, ours, theirs in columns:
            allowed = 0.0 if name in COUNTS or name.startswith("n") else tolerance * float(np.abs(theirs).max())
            worst = float(np.abs(ours - theirs).max())
            if not worst <= allowed and (known or "entropy" not in name):  # NaN differs from everything
                return f"{name} differs by {worst:.3g}"
        return ""

    def column(self, name: str) -> NDArray[np.float64]:
        """`[len(SIGNS), BINS]`."""
        return self.cells[:, :, COLUMNS.index(name)]


def _plain(value: float, is_count: bool, digits: int = 14) -> float | int | None:
    if is_count:
        return int(value)
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _rows(names: tuple[str, ...], table: NDArray[np.float64]) -> dict[str, list[float | int | None]]:
    """Columns of a table up to the last row with a token, without columns of zeros."""
    filled = np.flatnonzero(table[:, 0])
    used = table[: int(filled[-1]) + 1 if filled.size else 0]
    return {
        name: [_plain(value, name.startswith("n"), digits=8) for value in column.tolist()]
        for name, column in zip(names, used.T, strict=True)
        if column.any()
    }


def bin_of(position: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Return the bin of each position, from 1."""
    return np.minimum(np.searchsorted(LAST_POSITIONS, position), BINS - 1)


def histogram_bin(log_ratio: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each log r; NaN counts as 0."""
    size = np.abs(np.where(np.isnan(log_ratio), 0.0, log_ratio))
    with np.errstate(divide="ignore"):
        place = np.floor(np.log10(size / _SMALLEST) * _BINS_A_DECADE)
    place = np.clip(place, -1, _HALF - 1).astype(np.int64) + 1
    return _HALF + np.where(log_ratio < 0, -place, place)


def histogram_value(bin_: int) -> float:
    """Return the smallest |log r| of a bin of the histogram, with its sign: no quantile is beyond the extremes."""
    place = abs(bin_ - _HALF)
    size = 0.0 if place == 0 else _SMALLEST * 10 ** ((place - 1) / _BINS_A_DECADE)
    return math.copysign(size, bin_ - _HALF)


def quantile(histogram: NDArray[np.float64], share: float) -> float:
    """log r below which `share` of the tokens are, to one bin; NaN without tokens."""
    total = np.cumsum(histogram)
    if not total[-1]:
        return math.nan
    return histogram_value(int(np.searchsorted(total, share * total[-1])))
