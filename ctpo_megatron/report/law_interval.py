"""How sure the sqrt(t) law of S_t is: a bootstrap over the prompts of the last mini-batches, from dumps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.positions import BINS, bin_of
from ctpo_megatron.report.position_law import PositionLaw, fit_law, points_of_sums
from ctpo_megatron.tracking import read_heads, records_at, trajectory_files

if TYPE_CHECKING:
    from ctpo_megatron.report.run_data import RunData

LEAST_PROMPTS = 20
"""Fewer say nothing of their spread: the samples of a prompt are alike, so prompts are what is drawn again."""
RESAMPLES = 200
SURE = 0.95
"""Share of the resamples in which the law has to hold, or to fail."""


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
    by_prompt: dict[str, NDArray[np.float64]] = {}
    for run, step in sources:
        path = trajectory_files(run.directory).get(step)
        with suppress(DamagedFileError):
            for prompt, sums in _sums(path, run.setting("policy.mini_batch_prompts") or 0) if path else ():
                by_prompt[prompt] = by_prompt.get(prompt, 0.0) + sums
    return resampled([*by_prompt.values()])


def resampled(prompts: Sequence[NDArray[np.float64]]) -> LawInterval:
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


def _sums(path: Path, prompts: int) -> Iterator[tuple[str, NDArray[np.float64]]]:
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
