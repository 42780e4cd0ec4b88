"""Reward statistics of scored groups."""

from __future__ import annotations

from typing import Any

import pytest

from ctpo_megatron.data.records import NoVerdict, Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.rewards import COUNTS, OVERLONG, RESERVED, Scorer, ScoreReport

FAILED = NoVerdict("exception", "the scorer failed")


def scored(source: str, *rewards: float | None) -> Group:
    trajectories = [
        Trajectory("p", n, 0, reward=reward, no_verdict=FAILED if reward is None else None)
        for n, reward in enumerate(rewards)
    ]
    return Group(Prompt("p", source, (), "", ()), trajectories)


def metrics_of(groups: list[Group], report: ScoreReport) -> dict[str, float]:
    no_pool: Any = None  # they are scored
    return Scorer(no_pool).metrics(groups, [report])


def test_metrics_count_groups_with_a_signal():
    report = ScoreReport(scored=8, metrics={"no_box": 3.0})
    metrics = metrics_of([scored("a", 1, 0), scored("a", 0, 0), scored("a", 1, 1), scored("a", 0, 0)], report)
    assert metrics["reward/mean"] == pytest.approx(3 / 8)
    assert metrics["reward/groups_mixed"] == 1 / 4
    assert metrics["reward/no_box"] == 3
    counts = {"reward/timeouts", "reward/failures"}
    assert set(metrics) == {"reward/no_box", "reward/mean", "reward/std", "reward/groups_mixed", *counts}
    assert all(metrics[name] == 0 for name in counts)


def test_what_has_no_verdict_is_in_no_figure_but_its_own():
    groups = [
        scored("a", 1, None, 0),
        scored("a", None, None, 1),
        scored("a", None, None, None),
        scored("a", 1, 1, None),
    ]
    counts = {"timeout": 2, "exception": 1, "crash": 1, "none": 1, "not_finite": 2}
    metrics = metrics_of(groups, ScoreReport(5, counts))
    assert metrics["reward/mean"] == 4 / 5 and metrics["reward/std"] == pytest.approx(0.4)
    assert (metrics["reward/groups_mixed"], metrics["reward/groups_unjudged"]) == (1 / 4, 2)
    assert metrics["reward/no_verdict"] == 7 / 12
    assert {cause: metrics[f"reward/{COUNTS[cause]}"] for cause in counts} == counts
    assert set(metrics) == {f"reward/{name}" for name in RESERVED - {OVERLONG}}


def test_without_any_verdict_there_is_no_mean():
    metrics = metrics_of([scored("a", None, None)], ScoreReport(0, {"exception": 2}))
    assert metrics["reward/no_verdict"] == 1 and metrics["reward/groups_mixed"] == 0
    assert not {"reward/mean", "reward/std"} & metrics.keys()


def test_a_trajectory_that_was_not_scored_is_a_bug_not_a_missing_verdict():
    group = scored("a", 1, None)
    group.trajectories[0].reward = None
    with pytest.raises(ValueError, match=r"group p: samples \[0\] have no reward"):
        _ = group.rewards
