"""A metric over the steps of a group of runs: the mean over its seeds, and a band."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.report.confidence import student_interval
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.run_data import RunData

LEAST = 3
"""Seeds from which on the band is an interval: with two, Student's t is 12.7 standard errors wide."""


@dataclass(frozen=True)
class Band:
    """The mean of a metric over seeds, at the steps that all of them have.

    low, high: from `LEAST` seeds on the 95 % interval of the mean (Student's t); of two seeds both values; None for one
    seed. seeds: that have the metric. without: that do not. left_out: steps that only some of them have.
    """

    metric: str
    steps: list[float]
    mean: list[float]
    low: list[float] | None
    high: list[float] | None
    seeds: list[str]
    without: list[str]
    left_out: int

    @property
    def kind(self) -> str:
        """What the band is, for captions."""
        count = len(self.seeds)
        if count == 1:
            kind = "one seed, no band"
        elif count < LEAST:
            kind = f"mean and range of {count} seeds"
        else:
            kind = f"mean of {count} seeds and its 95 % interval (Student's t)"
        if self.without:
            kind += f"; {len(self.without)} more without the metric"
        return kind + (f"; {self.left_out} steps that not all seeds have are left out" if self.left_out else "")


def mean_and_band(group: RunGroup, metric: str) -> Band | None:
    """None when no run of the group has the metric. Repeated runs of a seed count once, by their mean."""
    curves = {seed: _mean_of(runs, metric) for seed, runs in group.by_seed.items()}
    found = {seed: curve for seed, curve in curves.items() if curve}
    if not found:
        return None
    common = set.intersection(*map(set, found.values()))
    steps = sorted(common)
    columns = [[curve[step] for curve in found.values()] for step in steps]
    ends = _ends(columns, len(found))
    return Band(
        metric=metric,
        steps=steps,
        mean=[sum(column) / len(column) for column in columns],
        low=None if ends is None else [low for low, _ in ends],
        high=None if ends is None else [high for _, high in ends],
        seeds=list(found),
        without=[seed for seed in curves if seed not in found],
        left_out=len(set.union(*map(set, found.values()))) - len(steps),
    )


def _mean_of(runs: Sequence[RunData], metric: str) -> dict[float, float]:
    """Step -> mean over the runs that have a value there."""
    values: dict[float, list[float]] = {}
    for series in filter(None, (run.series(metric) for run in runs)):
        for step, value in zip(series.steps, series.values, strict=True):
            values.setdefault(step, []).append(value)
    return {step: sum(found) / len(found) for step, found in values.items()}


def _ends(columns: Sequence[Sequence[float]], seeds: int) -> list[tuple[float, float]] | None:
    if seeds == 1:
        return None
    if seeds < LEAST:
        return [(min(column), max(column)) for column in columns]
    return [student_interval(column) for column in columns]
