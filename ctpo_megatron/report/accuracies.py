"""Accuracies of groups of runs and their differences, by data source, with verdicts in words. docs/compare.md"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctpo_megatron.report.estimates import (
    ONE_SEED,
    Estimate,
    Evaluations,
    ScoredSet,
    difference,
    evaluated_steps,
    evaluations,
    mean_score,
)
from ctpo_megatron.report.groups import RunGroup, run_name, runs_of

UNDECIDED = "cannot be told apart"


@dataclass(frozen=True)
class Accuracy:
    """Of one group and one data source."""

    group: str
    source: str
    estimate: Estimate


@dataclass(frozen=True)
class AccuracyDifference:
    """The accuracy of `group` less the accuracy of `other`, of one data source."""

    group: str
    other: str
    source: str
    estimate: Estimate

    @property
    def short_verdict(self) -> str:
        """`above`, `below`, or that nothing can be said."""
        if self.estimate.interval is None:
            return "not known"
        low, high = self.estimate.interval
        words = UNDECIDED if low <= 0 <= high else "above" if low > 0 else "below"
        return words if ONE_SEED not in self.estimate.notes else f"{words} (one seed)"

    @property
    def verdict(self) -> str:
        """What can be said of it, in words."""
        value, interval = self.estimate.value, self.estimate.interval
        if interval is None:
            return "not known: " + "; ".join(self.estimate.notes)
        low, high = interval
        if low <= 0 <= high:
            return UNDECIDED
        than = f"{self.group} is {100 * abs(value):.1f} points {'above' if value > 0 else 'below'} {self.other}"
        said = f"{than} (95 % interval {100 * low:+.1f} to {100 * high:+.1f}, over {self.estimate.over})"
        return f"{said}; {ONE_SEED}" if ONE_SEED in self.estimate.notes else said


@dataclass(frozen=True)
class SourceComparison:
    """Everything about one data source.

    accuracies: of the evaluation that is compared, a group each. gains: that less the one before training, where both
    were made. differences: of all pairs of groups, the later one less the earlier one.
    """

    source: str
    accuracies: list[Accuracy]
    gains: list[AccuracyDifference]
    differences: list[AccuracyDifference]


BEFORE = "before training"


def compare_accuracies(groups: Sequence[RunGroup]) -> list[SourceComparison]:
    """Of the last step that all runs were evaluated after, by data source; empty without evaluations.

    Without such a step: of the last evaluation of each run, and without differences. Raises DamagedFileError.
    """
    step = common_evaluation(groups)
    evaluated = [(group, evaluations(group, step), evaluations(group, 0)) for group in groups]
    sources = sorted({source for _, last, _ in evaluated for source in last.sources})
    return [_of_source(source, evaluated, differ=step is not None) for source in sources]


def common_evaluation(groups: Sequence[RunGroup]) -> int | None:
    """The last step after which all runs were evaluated, of those that were; None: there is none."""
    steps = [found for run in runs_of(groups) if (found := evaluated_steps(run))]
    return max(set.intersection(*steps), default=None) if steps else None


def notes_of_steps(groups: Sequence[RunGroup]) -> Iterator[str]:
    """At which step runs of different lengths are compared."""
    lasts = {run_name(run): max(found) for run in runs_of(groups) if (found := evaluated_steps(run))}
    if len(set(lasts.values())) > 1:
        step = common_evaluation(groups)
        shown = ", ".join(f"{name} {last}" for name, last in lasts.items())
        if step is None:
            yield f"Accuracies are not compared: no step was evaluated in all runs. They are of the last one: {shown}."
        else:
            yield f"Accuracies are compared after step {step}, the last one evaluated in all runs (last ones: {shown})."
    if len({run.last_step for run in runs_of(groups) if run.last_step}) > 1:
        yield f"Rewards and tool use are compared at step {common_step(groups)}, the last one that all runs have."


def common_step(groups: Sequence[RunGroup]) -> int:
    """The last step of the shortest run, of those that have made any; 0: none has."""
    return min((run.last_step for run in runs_of(groups) if run.last_step), default=0)


def _of_source(
    source: str, evaluated: Sequence[tuple[RunGroup, Evaluations, Evaluations]], differ: bool
) -> SourceComparison:
    found = SourceComparison(source, [], [], [])
    after: dict[str, dict[str, ScoredSet]] = {}
    for group, last, first in evaluated:
        if scores := last.of(source):
            after[group.label] = scores
            found.accuracies.append(_accuracy(group, source, scores))
            found.gains.extend(_gain(group.label, source, scores, first.of(source)))
    for other, group_label in itertools.combinations(after if differ else (), 2):
        estimate = difference(after[group_label], after[other])
        found.differences.append(AccuracyDifference(group_label, other, source, estimate))
    return found


def _gain(
    label: str, source: str, after: Mapping[str, ScoredSet], before: Mapping[str, ScoredSet]
) -> Iterator[AccuracyDifference]:
    """Over the seeds that were evaluated both times: before training, seeds differ too."""
    common = [seed for seed in after if seed in before]
    if common:
        estimate = difference({seed: after[seed] for seed in common}, {seed: before[seed] for seed in common})
        yield AccuracyDifference(label, BEFORE, source, estimate)


def _accuracy(group: RunGroup, source: str, by_seed: Mapping[str, ScoredSet]) -> Accuracy:
    estimate = mean_score(by_seed)
    if missing := [seed for seed in group.seeds if seed not in by_seed]:
        estimate.notes.append(f"no evaluation of seed {', '.join(missing)}")
    return Accuracy(group.label, source, estimate)
