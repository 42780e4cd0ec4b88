"""Reward statistics of a training batch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ctpo_megatron.data.batch import Group


class ReportedScores(Protocol):
    """What scoring reports in addition to rewards: failures, and the reward functions' own metrics."""

    @property
    def timeouts(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


def reward_metrics(groups: Sequence[Group], report: ReportedScores) -> dict[str, float]:
    """`reward/*`: mean and standard deviation over trajectories, share of groups with a signal, counts, and the metrics
    of the reward functions."""
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/groups_mixed": sum(len(set(group.rewards)) > 1 for group in groups) / len(groups),
        "reward/timeouts": float(report.timeouts),
        "reward/failures": float(report.failures),
        **{f"reward/{name}": value for name, value in report.metrics.items()},
    }
