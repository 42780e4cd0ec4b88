"""The sqrt(t) law is found where it holds, by the authors' formulas, and its absence is said."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ctpo_megatron.objective import PolicyObjective, PositionStats, position_stats
from ctpo_megatron.report.position_law import Points, fit_law, points_of_bins

SIGMA = 0.0387


def walks(power: float = 0.5, trajectories: int = 800, longest: int = 1_200, seed: int = 0) -> list[Any]:
    """S_t of trajectories of several lengths, whose standard deviation is SIGMA t^power."""
    rng = np.random.default_rng(seed)
    t = np.arange(1, longest + 1)
    steps = np.sqrt(np.diff((SIGMA * t**power) ** 2, prepend=0.0))
    lengths = rng.integers(longest // 4, longest + 1, trajectories)
    return [np.cumsum(rng.normal(0, steps[:length])) for length in lengths]


def stats(rows: list[Any]) -> PositionStats:
    d = np.concatenate([np.diff(row, prepend=0.0) for row in rows])
    mask = torch.ones(len(d), dtype=torch.bool)
    ends = torch.tensor(np.cumsum([0, *map(len, rows)]))
    zeros = torch.zeros(len(d))
    ctpo = PolicyObjective.preset("ctpo")
    return position_stats(torch.tensor(d, dtype=torch.float32), zeros, zeros + 1, mask, mask, ctpo, ends)


def authors_fit(rows: list[Any], least: int = 30) -> float:
    """sigma by the formulas of the authors' script, position by position."""
    columns = np.full((max(map(len, rows)), len(rows)), np.nan)
    for place, row in enumerate(rows):
        columns[: len(row), place] = row
    top = bottom = 0.0
    for t, column in enumerate(columns[:5_000], 1):
        values = column[~np.isnan(column)]
        if len(values) >= least:
            top += math.sqrt(len(values)) * math.sqrt(t) * float(np.std(values, ddof=1))
            bottom += math.sqrt(len(values)) * t
    return top / bottom


@pytest.mark.parametrize("trajectories", [800, pytest.param(3_000, marks=pytest.mark.slow)])
def test_the_law_is_found_where_it_holds(trajectories: int) -> None:
    rows = walks(trajectories=trajectories)
    law = fit_law(points_of_bins(stats(rows)))
    assert law is not None
    assert law.sigma == pytest.approx(SIGMA, rel=0.03) and law.exponent == pytest.approx(0.5, abs=0.03)
    assert law.r2 > 0.98 and law.how == "like"
    assert law.sigma == pytest.approx(authors_fit(rows), rel=2e-3)


@pytest.mark.parametrize("trajectories", [500, pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("power", [0.05, 1.0])
def test_another_exponent_is_named(power: float, trajectories: int) -> None:
    law = fit_law(points_of_bins(stats(walks(power, trajectories))))
    assert law is not None and law.exponent == pytest.approx(power, abs=0.05)
    assert law.free_r2 > max(law.r2, 0.95 if power == 1 else 0)
    assert law.how == "" and law.free_fit == f"t^{law.exponent:.2f}"


def test_nothing_is_fitted_to_nothing() -> None:
    assert fit_law(points_of_bins(PositionStats.empty())) is None
    assert fit_law(Points(np.arange(1.0, 9.0), np.zeros(8), np.full(8, 50.0), np.ones(8))) is None, "all ratios are 1"
    assert fit_law(points_of_bins(stats(walks(trajectories=4, longest=20)))) is None, "fewer than 30 tokens a bin"
    few = points_of_bins(stats(walks(trajectories=9, longest=1_000)))
    assert len(few.t) == 0, "tokens of nine trajectories, 700 of them in the last bins"
