"""Whether rewards still say anything: the share of samples without a verdict, and the end of a run with too many."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence

from ctpo_megatron.data import Batch, Trajectory

BATCHES = 3
"""Batches that `reward.max_failed` is a mean over: a judge may be away for one."""

_REMEDY = (
    "mend the reward function, or what it calls, and continue with run.resume=auto (and "
    "run.accept_changed_code=true if its code has changed)"
)


class TooManyFailed(RuntimeError):
    """Too many samples have no verdict; the message has the share, the first cause, and what to do."""


class Verdicts:
    """The samples without a verdict of the last batches. limit: `reward.max_failed`.

    It begins with every start of a run: the cause may be mended before a resume. Of the first step of all, where no
    verdict was ever given, one batch is enough.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._batches: deque[tuple[int, float, str]] = deque(maxlen=BATCHES)
        self._none_yet = ""

    def add(self, step: int, batch: Batch) -> None:
        """Take in all samples of a step, dropped groups included."""
        samples = [trajectory for group in batch.groups for trajectory in group.trajectories]
        missing = [trajectory for trajectory in samples if trajectory.no_verdict is not None]
        share = len(missing) / len(samples) if samples else 0.0
        self._batches.append((step, share, _cause(step, missing[0]) if missing else ""))
        self._none_yet = _most_frequent(missing) if step == 1 and share == 1 > self._limit else ""

    @property
    def problem(self) -> str:
        """Why the run must end, or ""; known from the third batch on, or after step 1 if it has no verdict at all."""
        if self._none_yet:
            return (
                f"no sample of step 1 has a verdict: {self._none_yet}. The state after step 1 is saved: {_REMEDY}, or "
                "set reward.max_failed=1. --dry-run tries the function on one trajectory"
            )
        share = statistics.fmean(share for _, share, _ in self._batches) if self._batches else 0.0
        if len(self._batches) < BATCHES or share <= self._limit:
            return ""
        steps, cause = [step for step, _, _ in self._batches], next(why for _, _, why in self._batches if why)
        return (
            f"{share:.0%} of the samples of steps {steps[0]} to {steps[-1]} have no verdict, more than "
            f"reward.max_failed = {self._limit:g} allows; the first: {cause}. The state after step {steps[-1]} is "
            f"saved: {_REMEDY}, or raise reward.max_failed"
        )


def _cause(step: int, trajectory: Trajectory) -> str:
    assert trajectory.no_verdict is not None  # of those without
    return (
        f"step {step}, prompt {trajectory.prompt_id} sample {trajectory.sample_index}: {trajectory.no_verdict.reason}"
    )


def _most_frequent(missing: Sequence[Trajectory]) -> str:
    reasons = Counter(trajectory.no_verdict.reason for trajectory in missing if trajectory.no_verdict is not None)
    ((reason, count),) = reasons.most_common(1)
    return f"{count} of {len(missing)} times {reason}"
