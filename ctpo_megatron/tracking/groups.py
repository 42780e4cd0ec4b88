"""Metrics of scored groups: reward statistics of a training batch, accuracies of an evaluation."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ctpo_megatron.data.records import Group


class ScoreCounts(Protocol):
    """What a scorer reports besides the rewards, in trajectories."""

    no_box: int
    timeouts: int
    failures: int


def reward_metrics(groups: Sequence[Group], counts: ScoreCounts) -> dict[str, float]:
    """`reward/*`: mean and standard deviation over trajectories, share of groups that carry a signal, scorer counts."""
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/groups_mixed": sum(len(set(group.rewards)) > 1 for group in groups) / len(groups),
        "reward/no_box": float(counts.no_box),
        "reward/timeouts": float(counts.timeouts),
        "reward/failures": float(counts.failures),
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
