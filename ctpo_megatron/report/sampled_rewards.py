"""Endpoints of the sampled reward: its mean over all steps, and the steps until it reaches a threshold. docs/compare.md

Every step of training counts, so they vary less from seed to seed than the accuracy after the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ctpo_megatron.report.accuracies import common_step
from ctpo_megatron.report.confidence import Ends, seeds_interval, student_interval, unanimous_interval, variance
from ctpo_megatron.report.endpoints import Endpoint, EndpointComparison, GroupDifference, GroupEstimate
from ctpo_megatron.report.estimates import ONE_SEED, Estimate
from ctpo_megatron.report.groups import RunGroup, run_name, runs_of
from ctpo_megatron.report.power import VariancePart, visible_difference
from ctpo_megatron.report.run_data import RunData

METRIC = "reward/mean"
_LAST = 5
"""Steps at the end that the threshold is chosen by."""
_ROUNDED = 1 / 12
"""Variance that counting in whole steps adds: seeds that agree by it are not equal."""


@dataclass(frozen=True)
class _RewardMeasure:
    """How values of seeds become an interval. of_run: the value of one run, and whether it counts as `never`.

    rounded: variance of one value that is due to its rounding. bounds: smallest and largest value.
    """

    endpoint: Endpoint
    of_run: Callable[[RunData], tuple[float, bool]]
    rounded: float = 0.0
    bounds: Ends | None = None


def compare_rewards(groups: Sequence[RunGroup], threshold: float | None) -> list[EndpointComparison]:
    """Compare the mean reward and the steps to a threshold, over the steps that all runs have; empty without rewards.

    Groups with a replay are left out: its rewards are another policy's. threshold: a mean reward of a step;
    None: halfway up (`halfway`).
    """
    steps = common_step(groups)
    groups = [group for group in groups if all(_rewards(run, steps) and not is_replay(run) for run in group.runs)]
    if not groups:
        return []
    mean = _RewardMeasure(Endpoint("mean reward"), lambda run: (fmean(_rewards(run, steps).values()), False))
    found = [_compared(mean, groups)]
    threshold = halfway(groups, steps) if threshold is None else threshold
    if threshold is not None:
        found.append(_compared(_steps_to(threshold, steps), groups))
    return found


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

    def first(run: RunData) -> tuple[float, bool]:
        reached = [step for step, value in _rewards(run, steps).items() if value >= threshold]
        return (min(reached), False) if reached else (steps + 1.0, True)

    return _RewardMeasure(Endpoint(f"steps to {threshold:g}", 1, unit="steps"), first, _ROUNDED, (1.0, steps + 1.0))


def _compared(measure: _RewardMeasure, groups: Sequence[RunGroup]) -> EndpointComparison:
    values = {group.label: _of_seeds(measure, group) for group in groups}
    found = EndpointComparison(measure.endpoint, [], [], [])
    for group in groups:
        never = sum(measure.of_run(run)[1] for run in group.runs)
        estimate = _mean_value(measure, [*values[group.label].values()])
        found.values.append(GroupEstimate(group.label, measure.endpoint, estimate, never, len(group.runs)))
    for other, label in itertools.combinations(values, 2):
        estimate = _less(measure, values[label], values[other])
        found.differences.append(GroupDifference(label, other, measure.endpoint, estimate))
    return found


Values = Mapping[str, tuple[float, bool]]
"""Seed -> its value, and whether any of its runs never reached the threshold."""


def _of_seeds(measure: _RewardMeasure, group: RunGroup) -> Values:
    """Runs of one seed count once, by their mean."""
    by_seed = {seed: [measure.of_run(run) for run in runs] for seed, runs in group.by_seed.items()}
    return {seed: (fmean(value for value, _ in found), any(never for _, never in found))
            for seed, found in by_seed.items()}  # fmt: skip


def _mean_value(measure: _RewardMeasure, values: Sequence[tuple[float, bool]]) -> Estimate:
    numbers = [value for value, _ in values]
    interval = _interval(numbers, measure.rounded, measure.bounds, any(never for _, never in values))
    return Estimate(fmean(numbers), interval, "seeds", 0, [] if interval else [ONE_SEED])


def _less(measure: _RewardMeasure, values: Values, others: Values) -> Estimate:
    """The mean of one group less the one of another: paired by seed from two common seeds on."""
    common = [seed for seed in values if seed in others]
    bounds = measure.bounds and (measure.bounds[0] - measure.bounds[1], measure.bounds[1] - measure.bounds[0])
    if len(common) > 1 or len(values) == len(others) == len(common):
        less = [values[seed][0] - others[seed][0] for seed in common]
        never = any(values[seed][1] or others[seed][1] for seed in common)
        interval = _interval(less, 2 * measure.rounded, bounds, never)
        parts = [_part(less, 2 * measure.rounded)] if interval else []
        rest = [seed for seed in {**values, **others} if seed not in common]
        notes = [f"paired by seed, without {', '.join(rest)}"] if rest else []
        return _estimate(fmean(less), interval, parts, notes)
    sides = [[value for value, _ in side.values()] for side in (values, others)]
    interval, parts = None, []
    if min(map(len, sides)) > 1:
        interval = seeds_interval([[[value] for value in side] for side in sides], least=measure.rounded)
        interval = _cut(interval, bounds)
        parts = [_part(side, measure.rounded) for side in sides]
    return _estimate(fmean(sides[0]) - fmean(sides[1]), interval, parts, ["not paired by seed"])


def _estimate(value: float, interval: Ends | None, parts: Sequence[VariancePart], notes: list[str]) -> Estimate:
    if interval is None:
        return Estimate(value, None, "", 0, [*notes, ONE_SEED])
    return Estimate(value, interval, "seeds", 0, notes, visible_difference(parts, interval))


def _part(values: Sequence[float], rounded: float) -> VariancePart:
    return max(variance(values), rounded) / len(values), len(values) - 1


def _interval(values: Sequence[float], rounded: float, bounds: Ends | None, never: bool) -> Ends | None:
    """Student's t over seeds; None for one. never: some seed's steps were more than could be counted.

    Equal values with such seeds say little: another seed may have reached the threshold at any step.
    """
    if len(values) < 2:
        return None
    low, high = student_interval(values, rounded)
    if never and bounds and len(set(values)) == 1:
        few = unanimous_interval(values[0], bounds, len(values))
        low, high = min(low, few[0]), max(high, few[1])
    return _cut((low, high), bounds)


def _cut(interval: Ends, bounds: Ends | None) -> Ends:
    return interval if bounds is None else (max(interval[0], bounds[0]), min(interval[1], bounds[1]))


def notes_of_rewards(found: Sequence[EndpointComparison], groups: Sequence[RunGroup]) -> Iterator[str]:
    """Say which runs never reached the threshold, which groups lack rewards, and how pairs were made."""
    for each in found:
        for value in each.values:
            if value.never:
                steps = common_step(groups)
                yield (
                    f"{value.group}, {each.endpoint.name}: {value.never} of {value.runs} runs did not get there in "
                    f"{steps} steps and count as {steps + 1}."
                )
        notes = {difference.estimate.notes[0]: difference for difference in each.differences
                 if difference.estimate.notes and difference.estimate.notes[0] != ONE_SEED}  # fmt: skip
        for note, difference in notes.items():
            yield f"{difference.group} against {difference.other}, {each.endpoint.name}: {note}."
    if replays := [run_name(run) for run in runs_of(groups) if is_replay(run)]:
        yield f"Rewards of a replay are the recording's and say nothing of the run: {', '.join(replays)}."
    if found and (without := [run_name(run) for run in runs_of(groups) if not run.series(METRIC)]):
        yield f"Without a sampled reward: {', '.join(without)}."
