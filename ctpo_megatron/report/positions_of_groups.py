"""Numbers by position in the response, of groups of runs, from positions.jsonl: figure 1 of the paper, and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.tracking import read_positions

if TYPE_CHECKING:
    from ctpo_megatron.base.positions import PositionStats
    from ctpo_megatron.report.law_interval import LawInterval
    from ctpo_megatron.report.position_law import PositionLaw
    from ctpo_megatron.report.run_data import RunData

LEAST = 30
"""Tokens of a bin from which on it is shown."""
CERTAIN, MANY = 0.1, 0.25
"""A position adds almost nothing to S_t where the mean d_t^2 is below this share of its mean over all tokens. Where at
least this share of the tokens is at such positions, that is why the law fails.
"""
GUIDE = 0.2
"""Half width of the band around sigma sqrt(t), as a share of it: the paper's guide, no interval."""


@dataclass(frozen=True)
class PositionSums:
    """Sums over the runs of a group and over `steps`, each once in ascending order.

    sources: run and step of each line.
    """

    label: str
    steps: list[int]
    stats: PositionStats
    sources: list[tuple[RunData, int]]


@dataclass(frozen=True)
class Growth:
    """Standard deviation of S_t, nats, at mean positions t of bins (figure 1, top).

    law: None for fewer than three bins, or without any spread. interval: how sure it is.
    """

    label: str
    t: list[float]
    std: list[float]
    law: PositionLaw | None
    interval: LawInterval

    @property
    def verdict(self) -> str:
        """Whether sqrt(t) holds, in words."""
        return self.interval.verdict(self.law) if self.law else "too few tokens at enough positions for a fit"

    def fitted(self) -> list[float]:
        """sigma sqrt(t) at the positions; empty without a fit."""
        return [self.law.sigma * t**0.5 for t in self.t] if self.law else []


@dataclass(frozen=True)
class ByPosition:
    """One quantity at mean positions t of bins with at least `LEAST` tokens."""

    label: str
    t: list[float]
    values: list[float]


def late_positions(group: RunGroup, mini_batch: str) -> PositionSums | None:
    """Of the second half of each run's steps with such records (`all`, `first`, `last`); None without any."""
    records: list[tuple[RunData, dict[str, Any]]] = []
    for run in group.runs:
        found = [*read_positions(run.directory, mini_batch)]
        records += [(run, record) for record in found if 2 * record["step"] > found[-1]["step"]]
    return _summed(group.label, records) if records else None


def chosen_steps(group: RunGroup) -> list[PositionSums]:
    """Of the first, the middle and the last step with records of the last mini-batch in all runs."""
    by_step: dict[int, list[tuple[RunData, dict[str, Any]]]] = {}
    for run in group.runs:
        for record in read_positions(run.directory, "last"):
            by_step.setdefault(record["step"], []).append((run, record))
    steps = sorted(step for step, records in by_step.items() if len(records) == len(group.runs))
    middle = sorted(steps[1:-1], key=lambda step: abs(2 * step - steps[-1]))[:1]
    chosen = sorted({*steps[:1], *middle, *steps[-1:]})
    return [_summed(f"step {step}", by_step[step]) for step in chosen]


def growth(sums: PositionSums) -> Growth:
    """Points and their fits, as the paper makes them."""
    from ctpo_megatron.report.law_interval import law_interval
    from ctpo_megatron.report.position_law import fit_law, points_of_bins

    points = points_of_bins(sums.stats)
    law = fit_law(points)
    return Growth(sums.label, points.t.tolist(), points.std.tolist(), law, law_interval(sums.sources if law else ()))


def why_not(sums: PositionSums, law: PositionLaw | None) -> str:
    """A sentence where the law fails and tokens that are almost certain explain it; else empty."""
    if law is None or law.how:
        return ""
    import numpy as np

    tokens, squares = (sums.stats.column(name).sum(0) for name in ("n_computed", "d2"))
    used = tokens >= LEAST
    still = used & (squares < CERTAIN * tokens * squares[used].sum() / np.maximum(1, tokens[used].sum()))
    share = tokens[still].sum() / np.maximum(1, tokens[used].sum())
    if share < MANY:
        return ""
    return (
        f"{share:.0%} of the tokens are at positions where the token is almost certain, as in the fixed parts of a "
        "tool call: they add nothing to the spread of S_t (docs/notebooks/theory.ipynb, When sqrt(t) fails)"
    )


def window_rates(sums: PositionSums) -> dict[str, ByPosition]:
    """Share of all loss tokens, advantage 0 included, that a window clips (figure 1, bottom).

    `fixed` and `widening` are the paper's two windows on S_t, `own` is what the bounds of the run's objective did.
    """
    sides = {"fixed": ("high", "low"), "widening": ("high", "low"), "clip": ("high", "low", "dual")}
    tokens, found = sums.stats.column("n_loss").sum(0), {}
    for window, names in sides.items():
        clipped = sum(sums.stats.column(f"{window}_{side}").sum(0) for side in names)
        found["own" if window == "clip" else window] = _shares(sums, clipped, tokens)
    return found


def clip_rates(sums: PositionSums) -> dict[str, ByPosition]:
    """Share of the loss tokens of a sign that each bound clips: `high` of positive advantages, `low` and `dual` of
    negative ones. Bounds that clip nothing are left out."""
    signs = {"high": 0, "low": 1, "dual": 1}
    found = {}
    for side, sign in signs.items():
        clipped, tokens = (sums.stats.column(name)[sign] for name in (f"clip_{side}", "n_loss"))
        if clipped.any():
            found[side] = _shares(sums, clipped, tokens)
    return found


def effective_sizes(sums: PositionSums) -> ByPosition:
    """Effective sample size of the weights exp(min(S_t, 10)), as a share of the tokens: (sum r)^2 / (n sum r^2)."""
    first, second, count = (sums.stats.column(name).sum(0) for name in ("r", "r2", "n_computed"))
    return _shares(sums, first**2, second * count, count)


def sampler_spread(sums: PositionSums) -> ByPosition | None:
    """Standard deviation of M_t, the sum over the prefix of trainer less sampler, nats; None where it is not known.

    The trainer is that before the updates of a step.
    """
    import numpy as np

    count, _, _, first, second = sums.stats.sampler.T
    if not count.any():
        return None
    tokens = np.maximum(1, count)
    spread = np.sqrt(np.maximum(0.0, second / tokens - (first / tokens) ** 2))
    return _shares(sums, spread * count, count)


def entropies(sums: PositionSums) -> ByPosition | None:
    """Mean entropy before the updates of a step, nats; None where it is not known."""
    total, count = (sums.stats.column(name).sum(0) for name in ("entropy", "n_entropy"))
    return _shares(sums, total, count) if count.any() else None


def _summed(label: str, records: Sequence[tuple[RunData, dict[str, Any]]]) -> PositionSums:
    from ctpo_megatron.base.positions import PositionStats

    sources = [(run, record["step"]) for run, record in records]
    parts = (PositionStats.of_record(record) for _, record in records)
    return PositionSums(label, sorted({step for _, step in sources}), sum(parts, PositionStats.empty()), sources)


def _shares(sums: PositionSums, upper: Any, lower: Any, count: Any = None) -> ByPosition:
    """One array over another, by bin. count: tokens of each bin, where the lower array is not that."""
    import numpy as np

    computed, total = (sums.stats.column(name).sum(0) for name in ("n_computed", "t"))
    tokens = lower if count is None else count
    used = np.flatnonzero((tokens >= LEAST) & (computed > 0) & (lower > 0) & np.isfinite(upper))
    return ByPosition(sums.label, (total[used] / computed[used]).tolist(), (upper[used] / lower[used]).tolist())
