"""Reward statistics of scored groups."""

from __future__ import annotations

import pytest

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.rewards import OVERLONG, RESERVED, ScoreReport, reward_metrics


def scored(source: str, *rewards: float) -> Group:
    trajectories = [Trajectory("p", n, 0, reward=reward) for n, reward in enumerate(rewards)]
    return Group(Prompt("p", source, (), "", ()), trajectories)


def test_reward_metrics_count_groups_with_a_signal():
    report = ScoreReport(scored=5, timeouts=2, failures=1, metrics={"no_box": 3.0})
    metrics = reward_metrics([scored("a", 1, 0), scored("a", 0, 0), scored("a", 1, 1), scored("a", 0, 0)], report)
    assert metrics["reward/mean"] == pytest.approx(3 / 8)
    assert metrics["reward/groups_mixed"] == 1 / 4
    assert (metrics["reward/no_box"], metrics["reward/timeouts"], metrics["reward/failures"]) == (3, 2, 1)
    assert set(metrics) == {"reward/no_box"} | {f"reward/{name}" for name in RESERVED - {OVERLONG}}
