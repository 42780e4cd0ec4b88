"""A trajectory of several sequences trains as its sequences would alone, and counts once in its group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ctpo_megatron.config import ObjectiveConfig, PolicyConfig
from ctpo_megatron.data import Trajectory, token_sequences
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.tokens import joined
from ctpo_megatron.data.trajectory import Batch, Group
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Layout, Trainer, policy_gradient
from tests.policy import models
from tests.policy.test_train import Run
from tests.support.recorded import through_a_file


def as_one(parts: list[Trajectory]) -> Trajectory:
    """One trajectory with the sequences of all; their turns are numbered through."""
    first, turns, tokens = parts[0], 0, []
    for part in parts:
        changed = part.tokens.copy()
        changed["turn"][changed["turn"] > 0] += turns
        turns += part.turns
        tokens.append(changed)
    starts = np.cumsum([len(part) for part in parts[:-1]]).tolist()
    return Trajectory(
        first.prompt_id, first.sample_index, first.seed, joined(tokens), "answer", reward=first.reward,
        sequence_starts=starts,
    )  # fmt: skip


def test_sequences_begin_where_they_say() -> None:
    parts = models.trajectories(3)
    whole = as_one(parts)
    assert [len(sequence) for sequence in token_sequences([whole])] == [len(part) for part in parts]
    assert [s.trajectory for s in token_sequences([parts[0], whole])] == [0, 1, 1, 1]
    assert through_a_file([whole]) == [whole]
    assert whole.sequence_model_tokens == [part.model_tokens for part in parts]
    assert "sequence_starts" not in parts[0].facts()
    for starts in ([0], [5, 5], [len(whole)]):
        with pytest.raises(ValueError, match="sequence_starts is"):
            Trajectory.of_facts(whole.facts() | {"sequence_starts": starts}, whole.tokens)


@pytest.mark.parametrize("ratio", ["ctpo", "ctpo-weight", "dppo-tv"])
def test_the_gradient_is_that_of_the_sequences_alone(model: Path, layout: Layout, ratio: str) -> None:
    """With token-mean: the prefix ratio restarts with each sequence, and each token is in the loss once."""
    parts = models.trajectories(4)
    found = []
    for trajectories, advantages in (
        (parts, [0.7, 0.7, -1.0, -1.0]),
        ([as_one(parts[:2]), as_one(parts[2:])], [0.7, -1.0]),
    ):
        policy = Trainer(PolicyConfig(), layout, model, temperature=1.0)
        (mini,) = policy.distribute(trajectories, advantages, len(trajectories))
        policy.compute_old_log_probs([mini])
        objective = PolicyObjective.preset(ratio, loss_agg_mode="token-mean")
        stats, named = policy.gradients(mini, policy_gradient(objective, "behaviour"))
        found.append((torch.cat([value.flatten() for _, value in named]).clone(), stats.sums, mini.denominators))
    (alone, sums, counts), (together, sums_together, counts_together) = found
    assert alone.norm() > 0
    assert torch.equal(alone, together) and torch.equal(sums, sums_together)
    assert counts == counts_together


def test_an_optimizer_step_is_cut_between_trajectories(model: Path, layout: Layout) -> None:
    parts = models.trajectories(6)
    batch = [as_one(parts[:3]), parts[3], parts[4], parts[5]]
    policy = Trainer(PolicyConfig(), layout, model, temperature=1.0)
    minis = policy.distribute(batch, [0.5, -0.5, 0.25, -0.25], 2)
    assert [mini.denominators.sequences for mini in minis] == [4, 2]
    advantages = [
        {
            place: set(micro.advantages[tokens].tolist())
            for micro in mini.micro_batches
            for place, tokens in micro.places()
        }
        for mini in minis
    ]
    assert advantages == [{0: {0.5}, 1: {0.5}, 2: {0.5}, 3: {-0.5}}, {4: {0.25}, 5: {-0.25}}]


@pytest.mark.parametrize("credit", ["outcome", "turn"])
def test_a_step_compares_conversations_and_traces_whole_trajectories(model: Path, layout: Layout, credit: str) -> None:
    """The baseline has one reward of a conversation, however many sequences it has."""
    parts = models.trajectories(5)
    parts[0].reward, parts[3].reward, parts[4].reward = 1.0, 0.0, 0.0
    trajectories = [as_one(parts[:3]), parts[3], parts[4]]
    group = Group(Prompt("p0", "s", (), "1", (1,)), trajectories)
    run = Run(model, layout, ObjectiveConfig.model_validate({"credit": credit}), 3, batches=1)
    result = run.train(Batch([group], weight_versions=(1,)))
    spread = np.std([1.0, 0.0, 0.0], ddof=1) + 1e-6
    found = {place: each["advantage"] for place, each in result.diagnostics.items()}
    assert found == pytest.approx({0: (2 / 3) / spread, 1: (-1 / 3) / spread, 2: (-1 / 3) / spread}, rel=1e-5)
    assert [len(result.diagnostics[place]["log_ratio"]) for place in range(3)] == [len(each) for each in trajectories]
    if credit == "turn":
        assert len(result.diagnostics[0]["turn_advantages"]) == trajectories[0].turns
