"""`objective.credit: turn` in `Trainer.train`: the bits of an outcome where turns say no more, and what they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import ObjectiveConfig, PolicyConfig
from ctpo_megatron.data.trajectory import Batch
from ctpo_megatron.policy import Layout, Trainer
from tests.policy import models
from tests.policy.test_train import Run, a_batch, comparable

OF_TURNS = [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5), (1.0, 1.0)]


def by_turn() -> Batch:
    """Two turns each; the totals of a group differ in its last trajectory alone."""
    batch = a_batch()
    for group in batch.groups:
        for trajectory, rewards in zip(group.trajectories, OF_TURNS, strict=True):
            trajectory.turn_rewards, trajectory.reward = list(rewards), sum(rewards)
    return batch


@pytest.mark.parametrize("preset", ["ctpo", "sapo"])
def test_rewards_of_the_last_turn_have_the_bits_of_an_outcome(model: Path, layout: Layout, preset: str) -> None:
    """Every trajectory has two turns; skipping those of advantage 0 included."""
    runs = [
        Run(model, layout, ObjectiveConfig.model_validate({"preset": preset, **credit}), 8, skip=True)
        for credit in ({}, {"credit": "turn"})
    ]
    outcome, turn = (run.train() for run in runs)
    assert torch.equal(runs[0].weights, runs[1].weights)
    assert comparable(outcome.metrics) == comparable(turn.metrics)


@pytest.mark.parametrize("turn_ratio", ["prefix", "turn-end"])
def test_what_turns_earn_changes_what_is_learned(model: Path, layout: Layout, turn_ratio: str) -> None:
    objectives = [{}, {"credit": "turn", "turn_ratio": turn_ratio}]
    runs = [Run(model, layout, ObjectiveConfig.model_validate(o), 8, batches=1, skip=True) for o in objectives]
    outcome, turn = (run.train(by_turn()) for run in runs)
    assert not torch.equal(runs[0].weights, runs[1].weights)
    # Equal totals are skipped by neither: three of four trajectories differ in the second turn.
    assert turn.metrics["tokens/trained"] == outcome.metrics["tokens/trained"] == turn.metrics["tokens/total"]
    first = turn.diagnostics[0]
    spread = np.std([1.0, 1.0, 1.0, 2.0], ddof=1) + 1e-6
    assert first["turn_advantages"] == pytest.approx([-0.25 / spread, 0.375 / spread], rel=1e-5)
    assert first["advantage"] == first["turn_advantages"][0]
    assert ("prefix_log_ratio" in first) == (turn_ratio == "turn-end")
    assert "turn_advantages" not in outcome.diagnostics[0]


def test_equal_totals_are_trained_on_by_turn_alone(model: Path, layout: Layout) -> None:
    batch = a_batch()
    for group in batch.groups:
        for number, trajectory in enumerate(group.trajectories):
            trajectory.turn_rewards, trajectory.reward = ([1.0, 0.0], [0.0, 1.0])[number % 2], 1.0
    trained = []
    for credit in ("outcome", "turn"):
        run = Run(model, layout, ObjectiveConfig.model_validate({"credit": credit}), 8, skip=True)
        trained.append(run.train(batch).metrics["tokens/trained"])
    assert trained[0] == 0 and trained[1] == sum(map(len, batch.trajectories))


def test_tokens_have_the_advantage_and_the_number_of_their_turn(model: Path, layout: Layout) -> None:
    policy = Trainer(PolicyConfig(), layout, model, temperature=1.0)
    trajectories = models.trajectories(4)
    advantages = [(1.0, -2.0), (0.0, 0.5), None, (0.0, 0.0)]
    (mini,) = policy.distribute(trajectories, advantages, 4, skip_zero_advantage=True, by_turn=True)
    seen = {}
    for micro in mini.micro_batches:
        assert micro.turn is not None
        for place, tokens in micro.places():
            assert micro.turn[tokens].tolist() == trajectories[place].turn
            seen[place] = dict(zip(micro.turn[tokens].tolist(), micro.advantages[tokens].tolist(), strict=True))
    assert seen == {0: {0: 1.0, 1: 1.0, 2: -2.0}, 1: {0: 0.0, 1: 0.0, 2: 0.5}}
    assert mini.denominators.sequences == 3
    for wrong in ((1.0, 2.0, 3.0), (1.0,)):
        with pytest.raises(ValueError, match=f"p0#1: {len(wrong)} advantages for 2 turns"):
            policy.distribute(trajectories, [(1.0, 1.0), wrong, None, None], 4, by_turn=True)


FUNCTION = """
from ctpo_megatron.objective import ObjectiveOutput


def loss(inputs):
    return ObjectiveOutput(-inputs.advantages * inputs.log_probs, {"turn": inputs.turn.float()})
"""


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_a_users_objective_is_given_the_turn_of_each_token(
    model: Path, layout: Layout, tmp_path: Path, credit: str
) -> None:
    (tmp_path / "sees_turns.py").write_text(FUNCTION)
    activate([tmp_path])
    objective = ObjectiveConfig.model_validate({"credit": credit, "function": "sees_turns:loss"})
    metrics = Run(model, layout, objective, 16).train().metrics
    turns = np.concatenate([t.tokens["turn"][t.tokens["response_mask"] == 1] for t in models.trajectories()])
    assert metrics["objective/turn"] == pytest.approx(turns.mean(), rel=1e-6)


WHAT_IS_KNOWN = """
from ctpo_megatron.objective import ObjectiveOutput


def loss(inputs):
    age = (inputs.version - inputs.weight_version).float()
    metrics = {"entropy_seen": inputs.entropy, "age": age, "group": inputs.group.float()}
    assert not inputs.entropy.requires_grad
    return ObjectiveOutput(-inputs.advantages * inputs.log_probs, metrics)
"""


def test_a_users_objective_is_given_entropy_version_and_group(model: Path, layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "sees_more.py").write_text(WHAT_IS_KNOWN)
    activate([tmp_path])
    objective = ObjectiveConfig.model_validate({"function": "sees_more:loss"})
    batch = a_batch()
    for index, trajectory in enumerate(batch.trajectories):
        trajectory.tokens["weight_version"] -= index % 5 * trajectory.tokens["response_mask"]
    metrics = Run(model, layout, objective, 16).train(batch).metrics
    assert metrics["objective/entropy_seen"] == pytest.approx(metrics["actor/entropy"], rel=1e-6)
    tokens = [t.model_tokens for t in batch.trajectories]
    assert metrics["objective/age"] == pytest.approx(np.average(np.arange(16) % 5, weights=tokens), rel=1e-6)
    assert metrics["objective/group"] == pytest.approx(np.average(np.arange(16) // 4, weights=tokens), rel=1e-6)


def test_a_prompt_that_is_drawn_twice_in_a_row_has_two_groups(model: Path, layout: Layout) -> None:
    policy = Trainer(PolicyConfig(), layout, model, temperature=1.0)
    twice = [*models.trajectories(3), *models.trajectories(2), models.trajectories(5)[4]]
    assert [(each.prompt_id, each.sample_index) for each in twice[2:]] == [("p0", 2), ("p0", 0), ("p0", 1), ("p1", 0)]
    (mini,) = policy.distribute(twice, [1.0] * 6, 6, version=4, by_turn=True)
    groups = {}
    for micro in mini.micro_batches:
        assert micro.group is not None and micro.version == 4
        groups |= {place: set(micro.group[tokens].tolist()) for place, tokens in micro.places()}
    assert groups == {0: {0}, 1: {0}, 2: {0}, 3: {1}, 4: {1}, 5: {2}}
