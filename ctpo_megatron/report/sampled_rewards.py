"""Endpoints of the sampled reward: its mean over all steps, and the steps until it reaches a threshold. docs/compare.md

Every step of training counts, so they vary less from seed to seed than the accuracy after the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from ctpo_megatron.report.accuracies import common_step
from ctpo_megatron.report.confidence import Ends, seeds_interval, student_interval, unanimous_interval, variance
from ctpo_megatron.report.endpoints import Endpoint, EndpointComparison
from ctpo_megatron.report.estimates import ONE_SEED, Estimate, paired_seeds
from ctpo_megatron.report.groups import RunGroup, run_name, runs_of
from ctpo_megatron.report.power import visible_difference
from ctpo_megatron.report.run_data import RunData

METRIC = "reward/mean"
_LAST = 5
"""Steps at the end that the threshold is chosen by."""
_ROUNDED = 1 / 12
"""Variance that counting in whole steps adds: seeds that agree by it are not equal."""


@dataclass(frozen=True)
class _RewardMeasure:
    """How values of seeds become an interval. of_run: the value of one run.

    rounded: variance of one value that is due to its rounding. bounds: smallest and largest value, or difference; a run
    that never reaches the threshold has the largest value.
    """

    endpoint: Endpoint
    of_run: Callable[[RunData], float]
    rounded: float = 0.0
    bounds: Ends | None = None

    def of_seeds(self, group: RunGroup) -> dict[str, float]:
        """Return seed -> its value. Runs of one seed count once, by their mean."""
        return {seed: fmean(map(self.of_run, runs)) for seed, runs in group.by_seed.items()}

    def is_never(self, value: float) -> bool:
        """Return whether the threshold is never reached."""
        return self.bounds is not None and value == self.bounds[1]

    def of_difference(self) -> _RewardMeasure:
        """Return the measure of a difference of two values."""
        bounds = self.bounds and (self.bounds[0] - self.bounds[1], self.bounds[1] - self.bounds[0])
        return replace(self, rounded=2 * self.rounded, bounds=bounds)

    def mean(self, group: RunGroup) -> Estimate:
        """Return the mean over the seeds of a group, with Student's interval."""
        values, notes = [*self.of_seeds(group).values()], list[str]()
        if never := sum(self.is_never(self.of_run(run)) for run in group.runs):
            last = self.bounds[1] if self.bounds else math.nan
            notes = [f"{never} of {len(group.runs)} runs did not get there in {last - 1:g} steps and count as {last:g}"]
        return _estimate(fmean(values), self.interval(values, any(map(self.is_never, values))), notes)

    def less(self, group: RunGroup, other: RunGroup) -> Estimate:
        """Return the mean of one group less the one of another."""
        values, others = self.of_seeds(group), self.of_seeds(other)
        seeds, notes = paired_seeds(values, others)
        of_difference = self.of_difference()
        if seeds is not None:
            less = [values[seed] - others[seed] for seed in seeds]
            never = any(self.is_never(side[seed]) for seed in seeds for side in (values, others))
            return _estimate(fmean(less), of_difference.interval(less, never), notes, [(less, of_difference.rounded)])
        sides = [[*values.values()], [*others.values()]]
        interval = None
        if min(map(len, sides)) > 1:
            found = seeds_interval([[[value] for value in side] for side in sides], least=self.rounded)
            interval = of_difference.cut(found)
        value = fmean(sides[0]) - fmean(sides[1])
        return _estimate(value, interval, notes, [(side, self.rounded) for side in sides])

    def interval(self, values: Sequence[float], never: bool) -> Ends | None:
        """Return Student's t over seeds; None for one. never: some seed's steps were more than could be counted.

        Equal values with such seeds say little: another seed may have reached the threshold at any step.
        """
        if len(values) < 2:
            return None
        low, high = student_interval(values, self.rounded)
        if never and self.bounds and len(set(values)) == 1:
            few = unanimous_interval(values[0], self.bounds, len(values))
            low, high = min(low, few[0]), max(high, few[1])
        return self.cut((low, high))

    def cut(self, interval: Ends) -> Ends:
        """Return the part of an interval that is possible."""
        return interval if self.bounds is None else (max(interval[0], self.bounds[0]), min(interval[1], self.bounds[1]))


def _estimate(
    value: float,
    interval: Ends | None,
    notes: list[str],
    differing: Sequence[tuple[Sequence[float], float]] = (),
) -> Estimate:
    """differing: of a difference the independent values that it is made of, and the variance of their rounding."""
    if interval is None:
        return Estimate(value, None, "", 0, [*notes, ONE_SEED])
    parts = [(max(variance(values), rounded) / len(values), len(values) - 1) for values, rounded in differing]
    return Estimate(value, interval, "seeds", 0, notes, visible_difference(parts, interval) if parts else None)


def compare_rewards(groups: Sequence[RunGroup], threshold: float | None) -> list[EndpointComparison]:
    """Compare the mean reward and the steps to a threshold, over the steps that all runs have; empty without rewards.

    Groups with a replay are left out: its rewards are another policy's. threshold: a mean reward of a step;
    None: halfway up (`halfway`).
    """
    steps = common_step(groups)
    groups = [group for group in groups if all(_rewards(run, steps) and not is_replay(run) for run in group.runs)]
    if not groups:
        return []
    measures = [_RewardMeasure(Endpoint("mean reward"), lambda run: fmean(_rewards(run, steps).values()))]
    threshold = halfway(groups, steps) if threshold is None else threshold
    if threshold is not None:
        measures.append(_steps_to(threshold, steps))
    by_label = {group.label: group for group in groups}
    return [EndpointComparison.of(each.endpoint, by_label, each.mean, each.less) for each in measures]


def is_replay(run: RunData) -> bool:
    """Return whether a run was trained on another run's samples."""
    return run.setting("rollout.replay") is not None


def mean_sampled_reward(run: RunData) -> float | None:
    """Return the mean of `reward/mean` over all steps; None: no step has one."""
    rewards = _rewards(run, run.last_step)
    return fmean(rewards.values()) if rewards else None


def halfway(groups: Sequence[RunGroup], steps: int) -> float | None:
    """Return the reward halfway from the first step to the best group's last ones, in hundredths; None: none has risen.

    first step: mean of all runs. last ones: mean of five steps.
    """
    first = fmean(next(iter(_rewards(run, steps).values())) for run in runs_of(groups))
    last = max(fmean(fmean([*_rewards(run, steps).values()][-_LAST:]) for run in group.runs) for group in groups)
    found = round((first + last) / 2, 2)
    return found if first < found <= last else None


def _rewards(run: RunData, steps: int) -> Mapping[float, float]:
    """Step -> mean reward, of the first `steps` steps."""
    series = run.series(METRIC)
    pairs = zip(series.steps, series.values, strict=True) if series else ()
    return {step: value for step, value in pairs if 0 < step <= steps}


def _steps_to(threshold: float, steps: int) -> _RewardMeasure:
    """The first step at the threshold. A run that never is there counts as one more step than it had."""

    def first(run: RunData) -> float:
        return min((step for step, value in _rewards(run, steps).items() if value >= threshold), default=steps + 1.0)

    return _RewardMeasure(Endpoint(f"steps to {threshold:g}", 1, unit="steps"), first, _ROUNDED, (1.0, steps + 1.0))


def notes_of_rewards(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Say which runs lack rewards of their own."""
    if replays := [run_name(run) for run in runs_of(groups) if is_replay(run)]:
        yield f"Rewards of a replay are the recording's and say nothing of the run: {', '.join(replays)}."
    without = [run_name(run) for run in runs_of(groups) if not run.series(METRIC)]
    if 0 < len(without) < len(runs_of(groups)):
        yield f"Without a sampled reward: {', '.join(without)}."
