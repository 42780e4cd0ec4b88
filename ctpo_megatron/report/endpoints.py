"""Endpoints: the numbers that groups of runs are compared by, their differences, and verdicts in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ctpo_megatron.report.estimates import ONE_SEED, Estimate

T = TypeVar("T")
UNDECIDED = "cannot be told apart"


@dataclass(frozen=True)
class Endpoint:
    """One number of a run. decimals: of its values. scale, unit: a difference is said as `scale` times it in `unit`."""

    name: str
    decimals: int = 3
    scale: float = 1.0
    unit: str = ""

    def text(self, value: float, sign: str = "") -> str:
        """Format a value. sign: `+` for a difference."""
        return f"{value:{sign}.{self.decimals}f}"

    def in_words(self, difference: float) -> str:
        """Format a difference with its unit, such as `6.2 points`."""
        return self.scaled(difference) + (f" {self.unit}" if self.unit else "")

    def scaled(self, difference: float, sign: str = "") -> str:
        """Format a difference in its unit, without the unit's name."""
        return f"{self.scale * difference:{sign}.{self.decimals if self.scale == 1 else 1}f}"


@dataclass(frozen=True)
class GroupDifference:
    """The endpoint of `group` less the one of `other`."""

    group: str
    other: str
    endpoint: Endpoint
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
        value, interval, words = self.estimate.value, self.estimate.interval, self.endpoint.in_words
        if interval is None:
            return "not known: " + "; ".join(self.estimate.notes)
        low, high = interval
        seen = "" if self.estimate.visible is None else f"80 % power for {words(self.estimate.visible)}"
        if low <= 0 <= high:
            return f"{UNDECIDED} ({seen})" if seen else UNDECIDED
        than = f"{self.group} is {words(abs(value))} {'above' if value > 0 else 'below'} {self.other}"
        ends = " to ".join(self.endpoint.scaled(end, "+") for end in interval)
        said = f"{than} (95 % interval {ends}, over {self.estimate.over})"
        return f"{said}; {ONE_SEED}" if ONE_SEED in self.estimate.notes else said


@dataclass(frozen=True)
class EndpointComparison:
    """Everything about one endpoint.

    values: label of a group that has it -> its mean over the seeds. differences: of all pairs of groups, the later one
    less the earlier one.
    """

    endpoint: Endpoint
    values: Mapping[str, Estimate]
    differences: Sequence[GroupDifference]

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        groups: Mapping[str, T],
        mean: Callable[[T], Estimate],
        less: Callable[[T, T], Estimate] | None,
    ) -> EndpointComparison:
        """Compare all pairs. groups: by label. less: the mean of one less the one of another; None: not compared."""
        differences = [
            GroupDifference(label, other, endpoint, less(groups[label], groups[other]))
            for other, label in itertools.combinations(groups, 2)
            if less
        ]
        return cls(endpoint, {label: mean(group) for label, group in groups.items()}, differences)

    @property
    def notes(self) -> Iterator[str]:
        """What to know of its figures: problems left out, how pairs were made. `notes_of` names groups of one seed."""
        told = [*self.values.items()]
        told += [(f"{each.group} against {each.other}", each.estimate) for each in self.differences]
        for label, estimate in told:
            left_out = [f"{estimate.left_out} problems left out"] if estimate.left_out else []
            notes = [note for note in estimate.notes if note != ONE_SEED]
            yield from (f"{label}, {self.endpoint.name}: {note}." for note in (*notes, *left_out))
