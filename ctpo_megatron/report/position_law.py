"""How the spread of S_t grows with the position t: the sqrt(t) law of the paper (figure 1), and how well it holds.

How sure that is, a bootstrap over the prompts of the last mini-batches says, from dumps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.positions import BINS, LAST_POSITIONS, PositionStats, bin_of
from ctpo_megatron.tracking import read_heads, records_at, trajectory_files

if TYPE_CHECKING:
    from ctpo_megatron.report.run_data import RunData

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
LEAST_PROMPTS = 20
"""Fewer say nothing of their spread: the samples of a prompt are alike, so prompts are what is drawn again."""
RESAMPLES = 200
SURE = 0.95
"""Share of the resamples in which the law has to hold, or to fail."""


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


@dataclass(frozen=True)
class LawInterval:
    """The law over resamples of the prompts.

    prompts: how many there are. sigma, exponent: 95 % intervals. holding: share of the resamples in which the law holds
    at least roughly. These three are meaningless for fewer than `LEAST_PROMPTS`.
    """

    prompts: int
    sigma: tuple[float, float] = (0.0, 0.0)
    exponent: tuple[float, float] = (0.0, 0.0)
    holding: float = 0.0

    def verdict(self, law: PositionLaw) -> str:
        """Return whether the law holds, in words. law: fitted to all prompts together."""
        found = f"R2 {law.r2:.2f}; {law.free_fit} fits with R2 {law.free_r2:.2f}"
        if self.prompts < LEAST_PROMPTS:
            known = f"{self.prompts} prompts in the dumps, {LEAST_PROMPTS} are needed"
            return f"whether std(S_t) grows like sqrt(t) is not known: {known} ({found})"
        sigma, exponent = ("{:.4f} to {:.4f}".format(*self.sigma), "{:.2f} to {:.2f}".format(*self.exponent))
        drawn = f"95 % over {self.prompts} prompts: sigma {sigma}, exponent {exponent}"
        if self.holding >= SURE:
            return f"std(S_t) grows {law.how or 'roughly like'} sqrt(t), sigma {law.sigma:.4f} ({found}; {drawn})"
        if self.holding <= 1 - SURE:
            return f"std(S_t) does not grow like sqrt(t) here ({found}; {drawn})"
        held = f"it holds in {self.holding:.0%} of the resamples"
        return f"whether std(S_t) grows like sqrt(t) is not known: {held} ({found}; {drawn})"


def law_interval(sources: Sequence[tuple[RunData, int]]) -> LawInterval:
    """Resample the prompts of the last mini-batch of each step of a run; dumps that cannot be read have none."""
    by_prompt: dict[str, Floats] = {}
    for run, step in sources:
        path = trajectory_files(run.directory).get(step)
        with suppress(DamagedFileError):
            for prompt, sums in _sums(path, run.setting("policy.mini_batch_prompts") or 0) if path else ():
                by_prompt[prompt] = by_prompt.get(prompt, 0.0) + sums
    return resampled([*by_prompt.values()])


def resampled(prompts: Sequence[Floats]) -> LawInterval:
    """prompts: of each, the number of its tokens and the sums of t, S and S^2 by bin, `[4, BINS]`."""
    if len(prompts) < LEAST_PROMPTS:
        return LawInterval(len(prompts))
    rng, stacked = np.random.default_rng(0), np.stack(prompts)
    drawn = rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), RESAMPLES)
    laws = [law for sums in np.tensordot(drawn, stacked, 1) if (law := fit_law(points_of_sums(*sums)))]
    if not laws:
        return LawInterval(len(prompts))
    sigma, exponent = (
        tuple(np.quantile(values, [0.025, 0.975]).tolist())
        for values in ([law.sigma for law in laws], [law.exponent for law in laws])
    )
    return LawInterval(len(prompts), sigma, exponent, sum(bool(law.how) for law in laws) / RESAMPLES)


def _sums(path: Path, prompts: int) -> Iterator[tuple[str, Floats]]:
    """The prompt of each trajectory of the last `prompts` groups of a dump that has ratios, and its sums."""
    starts = [0]
    heads = [head for head in read_heads(path) if head.traced]
    for number, (one, other) in enumerate(itertools.pairwise(heads), start=1):
        if other.prompt_id != one.prompt_id or other.sample_index <= one.sample_index:
            starts.append(number)
    places = [head.place for head in heads[starts[-prompts:][0] :]] if prompts and heads else []
    for record in records_at(path, places):
        s = np.array(record.get("prefix_log_ratio") or record["log_ratio"], np.float64)
        s = s[np.array(record["response_mask"]) > 0]
        t = np.arange(1, len(s) + 1)
        place = bin_of(t)
        yield record["prompt_id"], np.stack([np.bincount(place, each, BINS) for each in (np.ones_like(s), t, s, s**2)])
