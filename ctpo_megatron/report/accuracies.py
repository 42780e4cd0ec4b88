"""Accuracies of groups of runs and their differences, by data source, with verdicts in words. docs/compare.md"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctpo_megatron.report.estimates import ONE_SEED, Estimate, difference, mean_score, own_mean
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.scored_problems import Evaluations, ScoredSet, first_evaluations, last_evaluations

UNDECIDED = "cannot be told apart"


@dataclass(frozen=True)
class Accuracy:
    """Of one group and one data source. steps: after which it was evaluated. by_seed: the mean of each seed."""

    group: str
    source: str
    steps: list[int]
    estimate: Estimate
    by_seed: dict[str, float]


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

    accuracies: of the last evaluation, a group each. gains: after training less before it, where both were evaluated.
    differences: of all pairs of groups, the later one less the earlier one.
    """

    source: str
    accuracies: list[Accuracy]
    gains: list[AccuracyDifference]
    differences: list[AccuracyDifference]


BEFORE = "before training"


def compare_accuracies(groups: Sequence[RunGroup]) -> list[SourceComparison]:
    """Of the last evaluation of each run, by data source; empty without evaluations. Raises DamagedFileError."""
    last = [last_evaluations(group) for group in groups]
    first = [first_evaluations(group) for group in groups]
    sources = sorted({source for each in last for source in each.sources})
    return [_of_source(source, groups, last, first) for source in sources]


def _of_source(
    source: str, groups: Sequence[RunGroup], last: Sequence[Evaluations], first: Sequence[Evaluations]
) -> SourceComparison:
    labels = [group.label for group in groups]
    seeds = {group.label: group.seeds for group in groups}
    after = {label: each.of(source) for label, each in zip(labels, last, strict=True)}
    before = {label: each.of(source) for label, each in zip(labels, first, strict=True)}
    steps = {label: each.steps for label, each in zip(labels, last, strict=True)}
    there = [label for label in labels if after[label]]
    return SourceComparison(
        source,
        [_accuracy(label, source, steps[label], after[label], seeds[label]) for label in there],
        [gain for label in there for gain in _gain(label, source, after[label], before[label])],
        [
            AccuracyDifference(group, other, source, difference(after[group], after[other]))
            for other, group in itertools.combinations(there, 2)
        ],
    )


def _gain(
    label: str, source: str, after: Mapping[str, ScoredSet], before: Mapping[str, ScoredSet]
) -> Iterator[AccuracyDifference]:
    """Over the seeds that were evaluated both times: before training, seeds differ too."""
    common = [seed for seed in after if seed in before]
    if common:
        estimate = difference({seed: after[seed] for seed in common}, {seed: before[seed] for seed in common})
        yield AccuracyDifference(label, BEFORE, source, estimate)


def _accuracy(
    label: str, source: str, steps: list[int], by_seed: Mapping[str, ScoredSet], seeds: Sequence[str]
) -> Accuracy:
    means = {seed: own_mean(problems) for seed, problems in by_seed.items()}
    estimate = mean_score(by_seed)
    if missing := [seed for seed in seeds if seed not in by_seed]:
        estimate.notes.append(f"no evaluation of seed {', '.join(missing)}")
    return Accuracy(label, source, steps, estimate, means)
