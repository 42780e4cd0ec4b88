"""How the spread of S_t grows with the position t: the sqrt(t) law of the paper (figure 1), and how well it holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.positions import LAST_POSITIONS, PositionStats

Floats = NDArray[np.float64]
LONGEST = 5_000
"""Last position of the paper's figure."""
LEAST, LEAST_AT_ONE = 30, 10
"""Tokens of a bin, and trajectories at a position of it, from which on their standard deviation is used: the tokens of
one trajectory are no sample."""
EXPONENTS = [round(0.01 * place, 2) for place in range(-100, 301)]
"""Of the free fit."""
_WORDS = (((0.9, 0.1), "like"), ((0.7, 0.2), "roughly like"))
"""Where the law holds, and roughly holds: least R^2, and largest distance of the free exponent from 1/2."""


@dataclass(frozen=True)
class Points:
    """Standard deviation of S_t, nats, at positions t (means over a bin), all `[P]`.

    Each is from `count` tokens at `width` positions.
    """

    t: Floats
    std: Floats
    count: Floats
    width: Floats

    @property
    def weight(self) -> Floats:
        """Of a point in a fit: the authors' script has sqrt(trajectories) for each position."""
        return np.sqrt(self.width * self.count)


@dataclass(frozen=True)
class PositionLaw:
    """std(S_t) = sigma sqrt(t), fitted with `Points.weight`, and std(S_t) = scale t^exponent, fitted freely.

    sigma, scale: nats. r2, free_r2: explained share of the weighted variance of the points; negative: worse than their
    mean.
    """

    sigma: float
    r2: float
    exponent: float
    scale: float
    free_r2: float

    @property
    def how(self) -> str:
        """`like` sqrt(t), or `roughly like` it; empty where the law fails."""
        near = abs(self.exponent - 0.5)
        holding = (how for (least, most), how in _WORDS if self.r2 >= least and near <= most)
        return next(holding, "")

    @property
    def free_fit(self) -> str:
        """The power that fits best, in words; the search for it ends somewhere."""
        end = {EXPONENTS[0]: " or less, the end of the search,", EXPONENTS[-1]: " or more, the end of the search,"}
        return f"t^{self.exponent:.2f}{end.get(self.exponent, '')}"


def points_of_bins(stats: PositionStats) -> Points:
    """From the sums of a step: a point for each bin of positions, tokens of all signs of the advantage together."""
    return points_of_sums(*(stats.column(name).sum(0) for name in ("n_computed", "t", "S", "S2")))


def points_of_sums(count: Floats, t: Floats, first: Floats, second: Floats) -> Points:
    """From the number of tokens in each bin, and the sums of t, S_t and its square over them, `[BINS]` each."""
    with np.errstate(divide="ignore", invalid="ignore"):
        std = np.sqrt(np.maximum(second - first**2 / count, 0.0) / (count - 1))
        mean = t / count
    width = np.diff((0, *LAST_POSITIONS)).astype(np.float64)
    used = (count >= np.maximum(LEAST, LEAST_AT_ONE * width)) & (mean <= LONGEST) & np.isfinite(std)
    return Points(mean[used], std[used], count[used], width[used])


def fit_law(points: Points) -> PositionLaw | None:
    """None for fewer than three points, or without any spread.

    sigma = sum(w sqrt(t) y) / sum(w t), as in the authors' script (plot_pg_ratio_position_density.py).
    """
    positive = points.std > 0
    if np.count_nonzero(positive) < 3:
        return None
    t, y, w = points.t, points.std, points.weight
    powers = t ** np.array([*EXPONENTS, 0.5])[:, None]
    factors = (w * powers * y).sum(1) / (w * powers**2).sum(1)  # with the least weighted squares
    spread = float((w * (y - np.average(y, weights=w)) ** 2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        explained = 1.0 - (w * (y - factors[:, None] * powers) ** 2).sum(1) / spread if spread else factors * math.nan
    best = int(np.argmax(explained[:-1]))
    scale, sigma = float(factors[best]), float(factors[-1])
    return PositionLaw(sigma, float(explained[-1]), EXPONENTS[best], scale, float(explained[best]))
