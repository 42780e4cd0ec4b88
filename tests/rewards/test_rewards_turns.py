"""Rewards of turns: what a function may return, how they travel from its process, and where shaping lands."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.config import RewardConfig
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import OverlongPenalty, Reward, RewardPool, Scorer
from tests.support.recorded import through_a_file

FUNCTION = """
import json
from ctpo_megatron.rewards import Reward

def score(trajectory, prompt):
    given = json.loads(trajectory.final_text)
    return Reward(**given) if isinstance(given, dict) else given
"""
THIRD = 1 / 3


def answers(*given: object, turns: int = 2) -> Group:
    """A group of answers that say what they earn, each after `turns` turns of two tokens."""
    found = []
    for sample, value in enumerate(given):
        trajectory = Trajectory("p", sample, seed=0, final_text=json.dumps(value))
        trajectory.append_context([1] * 7, turn=0)
        for turn in range(1, turns + 1):
            trajectory.append_model([2, 3], [-1.0, -1.0], [1, 1], turn)
            trajectory.append_context([4], turn)
        found.append(trajectory)
    return Group(Prompt("p", "mine", (), "4", (1,) * 7), found)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder: Path = tmp_path_factory.mktemp("turns")
    (folder / "rewards_of_turns.py").write_text(FUNCTION)
    with RewardPool(RewardConfig.model_validate({"function": "rewards_of_turns:score"}), [str(folder)]) as workers:
        yield workers


def test_rewards_of_turns_arrive_as_exactly_as_the_value(pool: RewardPool) -> None:
    group = answers({"turns": [THIRD, 1e-17]}, {"turns": [0.1, 0.2], "value": 0.3}, 2.5)
    assert asyncio.run(pool.score([group])).scored == 3
    first, second, third = group.trajectories
    assert (first.reward, first.turn_rewards) == (math.fsum([THIRD, 1e-17]), [THIRD, 1e-17])
    assert (second.reward, second.turn_rewards) == (0.3, [0.1, 0.2])
    assert (third.reward, third.turn_rewards) == (2.5, None)
    assert group.returns == [[THIRD + 1e-17, 1e-17], [0.2 + 0.1, 0.2], [2.5, 2.5]]
    assert through_a_file(group.trajectories) == group.trajectories
    assert "turn_rewards" not in third.facts()


@pytest.mark.parametrize(
    ("given", "cause", "reason"),
    [
        ({"turns": [1.0]}, "exception", "Reward.turns has 1 rewards, and the trajectory 2 model turns"),
        ({"turns": [1.0, 2.0, 3.0]}, "exception", "return one reward for each"),
        ({"turns": [1.0, None]}, "none", "the scorer returned None for turn 2"),
        ({"turns": [1.0, None], "value": 1.0}, "none", "the scorer returned None for turn 2"),
        ({"turns": [1.0, 2.0], "value": None}, "none", "the scorer returned None"),
        ({"turns": [math.nan, 2.0]}, "not_finite", "the scorer returned turn 1=nan"),
        ({"turns": [1.0, 1e39], "value": 1e39}, "not_finite", "the scorer returned turn 2=1e+39"),
        ({"turns": [1.0, 2.0], "value": 2.5}, "exception", "value is 2.5, but turns [1.0, 2.0] add up to 3"),
        ({}, "exception", "give value, or turns, whose sum it is"),
    ],
)
def test_what_is_no_verdict_is_counted_and_named(pool: RewardPool, given: object, cause: str, reason: str) -> None:
    group = answers(given, {"turns": [0.0, 1.0]})
    assert asyncio.run(pool.score([group])).missing == {cause: 1}
    bad, good = group.trajectories
    assert bad.no_verdict is not None and reason in bad.no_verdict.reason and bad.turn_rewards is None
    assert good.turn_rewards == [0.0, 1.0] and group.returns == [None, [1.0, 1.0]]


def test_a_second_judgement_leaves_nothing_of_the_first(pool: RewardPool) -> None:
    group = answers({"turns": [1.0, 2.0]})
    asyncio.run(pool.score([group]))
    group.trajectories[0].final_text = "0.5"
    asyncio.run(pool.score([group]))
    assert (group.trajectories[0].reward, group.trajectories[0].turn_rewards) == (0.5, None)


def test_the_last_turn_bears_the_penalty_of_length(pool: RewardPool) -> None:
    group = answers({"turns": [1.0, 2.0]}, 1.0)
    asyncio.run(Scorer(pool, OverlongPenalty(buffer=4, penalty=1.0, budget=8)).score([group]))
    with_turns, without = group.trajectories
    assert (with_turns.reward, with_turns.turn_rewards) == (2.5, [1.0, 1.5])  # six of eight tokens
    assert (without.reward, without.turn_rewards) == (0.5, None)


def test_the_mean_reward_of_each_turn_is_a_metric(pool: RewardPool) -> None:
    groups = [answers({"turns": [1.0, 4.0]}, {"turns": [0.0, 1.0]}, 7.0), answers({"turns": [5.0]}, turns=1)]
    scoring = Scorer(pool)
    metrics = scoring.metrics(groups, [asyncio.run(scoring.score(groups))])
    found = {name: value for name, value in metrics.items() if name.startswith("reward/turn/")}
    assert found == {"reward/turn/1": 2.0, "reward/turn/2": 2.5}


def test_a_group_of_equal_totals_has_a_signal_by_turn(pool: RewardPool) -> None:
    groups = [answers({"turns": [1.0, 0.0]}, {"turns": [0.0, 1.0]}), answers({"turns": [1.0, 1.0]}, 2.0)]
    for by_turn, share in ((False, 0.0), (True, 1.0)):
        scoring = Scorer(pool, by_turn=by_turn)
        assert scoring.metrics(groups, [asyncio.run(scoring.score(groups))])["reward/groups_mixed"] == share
    (alike,) = [answers({"turns": [1.0, 1.0]}, {"turns": [1.0, 1.0]})]
    asyncio.run(pool.score([alike]))
    assert not alike.is_mixed(by_turn=True)


def test_who_ends_early_differs_from_who_earns_nothing_later() -> None:
    early, late = (answers(0, turns=turns).trajectories[0] for turns in (1, 2))
    early.reward, early.turn_rewards, late.reward, late.turn_rewards = 1.0, [1.0], 1.0, [1.0, 0.0]
    group = Group(answers(0).prompt, [early, late])
    assert not group.is_mixed(by_turn=True)
    late.turn_rewards = [0.5, 0.5]
    assert group.is_mixed(by_turn=True) and not group.is_mixed(by_turn=False)


def test_missing_turns_are_said_once(pool: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    without, by_turn = Scorer(pool), Scorer(pool, by_turn=True)
    with caplog.at_level(logging.WARNING):
        for scorer in (without, by_turn, by_turn):
            asyncio.run(scorer.score([answers(1.0, {"turns": [1.0, 2.0]})]))
    said = [record.message for record in caplog.records]
    assert len(said) == 1 and "the reward function of 'mine' gives no rewards of turns" in said[0]


def test_a_reward_may_leave_its_value_out() -> None:
    assert Reward(turns=[1.0, 2.0]).value == 3.0 and Reward(turns=[1.0, None]).value is None
    assert Reward(turns=[0.1] * 10, value=1.0).value == 1.0  # the sum of ten in another order
    with pytest.raises(ValueError, match="leave value out, or give their sum"):
        Reward(turns=[0.1] * 10, value=1.0 + 1e-8)
