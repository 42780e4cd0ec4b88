"""Metrics of scored groups: reward statistics of a training batch, accuracies of an evaluation."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ctpo_megatron.data.records import Group


class ScoreReport(Protocol):
    """What scoring reports besides the rewards: trajectories without one, and the reward functions' own metrics."""

    @property
    def timeouts(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def reward_metrics(groups: Sequence[Group], report: ScoreReport) -> dict[str, float]:
    """`reward/*`: mean and standard deviation over trajectories, share of groups that carry a signal, counts, and what
    the reward functions add."""
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/groups_mixed": sum(len(set(group.rewards)) > 1 for group in groups) / len(groups),
        "reward/timeouts": float(report.timeouts),
        "reward/failures": float(report.failures),
        **{f"reward/{name}": value for name, value in report.metrics.items()},
    }


def evaluation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`val/<data_source>/acc/mean@k` and, for k > 1 samples, `best@k` (share of prompts solved at least once)."""
    by_source: dict[str, list[list[float]]] = defaultdict(list)
    for group in groups:
        by_source[group.prompt.data_source].append(group.rewards)
    metrics = {}
    for source, rewards in sorted(by_source.items()):
        k = len(rewards[0])
        metrics[f"val/{source}/acc/mean@{k}"] = statistics.fmean(r for sample in rewards for r in sample)
        if k > 1:
            metrics[f"val/{source}/acc/best@{k}"] = statistics.fmean(max(sample) for sample in rewards)
    return metrics
