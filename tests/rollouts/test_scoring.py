"""Soft overlong punishment against its formula, and rewards that are scored in several rounds and reported once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ctpo_megatron.config import RewardConfig
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import OverlongPenalty, RewardPool, Scorer, ScoreReport
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer
from tests.rollouts.test_rollouts import Run

REWARD = """
from ctpo_megatron.rewards import Reward

def score(trajectory, prompt):
    right = float(trajectory.final_text == prompt.answer)
    if trajectory.final_text == "?":
        raise ValueError("no answer")
    return Reward(right, components={"right": right}, metrics={"empty": not trajectory.final_text})
"""


def answers(*texts: str, tokens: int = 10) -> Group:
    """A group whose responses have this many tokens, half of them of a tool."""
    found = []
    for sample, text in enumerate(texts):
        trajectory = Trajectory("p", sample, seed=0, final_text=text)
        trajectory.append_context([1] * 7, turn=0)
        trajectory.append_model(
            [2] * (tokens - tokens // 2), [-1.0] * (tokens - tokens // 2), [1] * (tokens - tokens // 2), turn=1
        )
        trajectory.append_context([3] * (tokens // 2), turn=1)
        found.append(trajectory)
    return Group(Prompt("p", "mine", (), "4", (1,) * 7), found)


def published(tokens: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO, as it is printed."""
    if tokens <= longest - cache:
        return 0.0
    if tokens <= longest:
        return ((longest - cache) - tokens) / cache
    return -1.0


@pytest.mark.parametrize(("budget", "buffer", "penalty"), [(20480, 4096, 1.0), (100, 40, 0.5), (30, 30, 1.0)])
def test_the_penalty_is_the_published_one(budget: int, buffer: int, penalty: float) -> None:
    shaping = OverlongPenalty(buffer, penalty, budget)
    lengths = [0, 1, budget - buffer, budget - buffer + 1, budget - buffer // 2, budget - 1, budget, budget + 1]
    for tokens in lengths:
        assert shaping.of(tokens) == pytest.approx(penalty * published(tokens, budget, buffer), abs=1e-15)
    assert shaping.of(budget) == -penalty and shaping.of(budget - buffer) == 0.0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    folder: Path = tmp_path_factory.mktemp("scoring")
    (folder / "scored_in_rounds.py").write_text(REWARD)
    config = RewardConfig.model_validate({"function": "scored_in_rounds:score"})
    with RewardPool(config, [str(folder)]) as workers:
        yield workers


def test_the_penalty_is_a_component_of_the_reward_in_training_alone(pool: RewardPool) -> None:
    groups = [answers("4", "5", tokens=10), answers("4", "5", tokens=18)]
    plain = Scorer(pool)
    reports = [asyncio.run(plain.score(groups))]
    assert [group.rewards for group in groups] == [[1.0, 0.0], [1.0, 0.0]]
    assert "reward/overlong_penalty" not in plain.metrics(groups, reports)
    shaped = Scorer(pool, OverlongPenalty(buffer=8, penalty=0.4, budget=20))
    reports = [asyncio.run(shaped.score(groups))]
    assert [group.rewards for group in groups] == [[1.0, 0.0], [pytest.approx(0.7), pytest.approx(-0.3)]]
    assert groups[1].trajectories[1].reward_components == {"right": 0.0, "overlong_penalty": pytest.approx(-0.3)}
    metrics = shaped.metrics(groups, reports)
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.15)
    assert metrics["reward/right"] == 0.5 and metrics["reward/mean"] == pytest.approx(0.35)


def test_rounds_are_reported_as_one_batch(pool: RewardPool) -> None:
    groups = [answers("4", "5"), answers("", "?"), answers("4", "4", "4")]
    scoring = Scorer(pool)
    rounds = scoring.metrics(groups, [asyncio.run(scoring.score(part)) for part in (groups[:1], groups[1:])])
    assert rounds == scoring.metrics(groups, [asyncio.run(scoring.score(groups))])
    assert rounds["reward/empty"] == 1.0 and rounds["reward/failures"] == 1.0
    assert rounds["reward/right"] == pytest.approx(4 / 6) and rounds["reward/no_verdict"] == pytest.approx(1 / 7)


def test_the_penalty_is_of_judged_answers_alone(pool: RewardPool) -> None:
    groups = [answers("4", "?", "5", tokens=18), answers("?", tokens=18)]
    shaped = Scorer(pool, OverlongPenalty(buffer=8, penalty=0.4, budget=20))
    report = asyncio.run(shaped.score(groups))
    assert groups[0].rewards == [pytest.approx(0.7), None, pytest.approx(-0.3)] and groups[1].rewards == [None]
    assert groups[0].trajectories[1].reward_components == {}
    metrics = shaped.metrics(groups, [report])
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.3)
    assert (metrics["reward/mean"], metrics["reward/no_verdict"]) == (pytest.approx(0.2), 0.5)
    nothing = shaped.metrics(groups[1:], [asyncio.run(shaped.score(groups[1:]))])
    assert "reward/overlong_penalty" not in nothing and "reward/mean" not in nothing


def test_a_checkpoint_keeps_what_was_missing() -> None:
    """A batch that is sampled ahead is counted after the resume."""

    class Failing(ScriptedScorer):
        async def score(self, groups: Sequence[Group]) -> ScoreReport:
            await super().score(groups)
            return ScoreReport(1, {"timeout": 1, "exception": 3})

    with Run(ScriptedEngines(stuck=[(2, 3)]), scorer=Failing()).going() as first:
        first.train(until=1)
        while len(first.scorer.begun) < 7:
            time.sleep(0.001)
        state = first.state()
    with Run(done=1, state=state).going() as again:
        again.train(until=2)
    assert [report.missing for report in again.scorer.reports] == [{"timeout": 1, "exception": 3}] * 3 + [{}]
