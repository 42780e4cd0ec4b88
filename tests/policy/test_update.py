"""What an optimizer step reports and refuses."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.data import DataError, Trajectory
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    Layout,
    MismatchError,
    Trainer,
    check_mismatch,
)
from tests.policy import models
from tests.policy.stepping import step


@pytest.fixture(scope="module")
def policy(model: Path, layout: Layout) -> Trainer:
    return Trainer(PolicyConfig(max_bad_steps=1), layout, model, temperature=1.0)


def test_the_gradient_norm_is_reported_without_clipping_too(policy: Trainer) -> None:
    norms = []
    for clip in (1e-3, 0.0):
        policy.use_optimizer(OptimizerConfig(lr=1e-12, clip_grad=clip), total_steps=1)
        norms.append(step(policy).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[1] > 0


def test_every_trajectory_of_every_optimizer_step_keeps_its_advantage(policy: Trainer) -> None:
    advantages = [0.25 * index - 1 for index in range(16)]
    found = {
        place: set(micro.advantages[tokens].tolist())
        for mini_batch in policy.distribute(models.trajectories(), advantages, size=4)
        for micro in mini_batch.micro_batches
        for place, tokens in micro.places()
    }
    assert found == {place: {advantage} for place, advantage in enumerate(advantages)}


@pytest.mark.parametrize("token", [models.VOCAB, 511, 512, -1])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_token_beyond_the_vocabulary_is_named(policy: Trainer, token: int, sampled: bool) -> None:
    """Megatron pads the vocabulary to 512 rows, which would be trained."""
    trajectories = models.trajectories()
    position = trajectories[6].response_mask.index(int(sampled))
    trajectories[6].tokens["token_ids"][position] = token
    message = rf"trajectory p1#2 has token id {token} at position {position}, but the model's vocabulary has 500 "
    with pytest.raises(DataError, match=message):
        policy.distribute(trajectories, models.advantages(), 16)


@pytest.mark.parametrize("count", [15, 17])
def test_every_trajectory_has_one_advantage(policy: Trainer, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} advantages for 16 trajectories"):
        policy.distribute(models.trajectories(), [0.5] * count, size=16)


def test_a_batch_without_a_token_of_the_model_has_old_log_probs(policy: Trainer) -> None:
    prompts = [Trajectory(f"p{index}", 0, seed=0) for index in range(2)]
    for prompt in prompts:
        prompt.append_context([1, 2, 3], turn=0)
    found = policy.compute_old_log_probs(policy.distribute(prompts, [1.0, -1.0], size=2))
    assert found == {"mismatch/tokens": 0}


def test_sampler_and_trainer_are_compared_at_tokens_of_the_same_weights_only(policy: Trainer) -> None:
    trajectories = models.trajectories(2)
    for trajectory in trajectories:  # the last sampled token alone is of version 7
        last = len(trajectory) - 1 - trajectory.response_mask[::-1].index(1)
        trajectory.tokens["weight_version"] = 6 * np.asarray(trajectory.response_mask)
        trajectory.tokens["weight_version"][last] = 7
    whole = policy.compute_old_log_probs(policy.distribute(trajectories, [1.0, -1.0], 2))
    (mini_batch,) = policy.distribute(trajectories, [1.0, -1.0], 2, version=7)
    [micro] = mini_batch.micro_batches
    found = policy.compute_old_log_probs([mini_batch])
    assert micro.old_log_probs is not None and int(micro.current.sum()) == 2 < int(micro.response_mask.sum())
    differences = (micro.old_log_probs - micro.rollout_log_probs)[micro.current].abs()
    assert found["mismatch/tokens"] == 2
    assert found["mismatch/log_prob_abs_max"] == pytest.approx(float(differences.max()))
    assert found["mismatch/log_prob_abs_mean"] == pytest.approx(float(differences.mean()))
    assert found["actor/entropy"] == whole["actor/entropy"]
    none = policy.compute_old_log_probs(policy.distribute(trajectories, [1.0, -1.0], 2, version=8))
    assert none == {"mismatch/tokens": 0, "actor/entropy": whole["actor/entropy"]}


def test_the_same_sample_twice_has_two_diagnostics(policy: Trainer) -> None:
    twice = [models.trajectories(1)[0] for _ in range(2)]
    (mini_batch,) = policy.distribute(twice, [1.0, -1.0], size=2)
    policy.compute_old_log_probs([mini_batch])
    found = policy.token_diagnostics(mini_batch, PolicyObjective.preset("ctpo"))
    assert {place: fields["advantage"] for place, fields in found.items()} == {0: 1.0, 1: -1.0}


@pytest.mark.parametrize("found", [0.1, math.nan])
def test_a_mismatch_beyond_the_limit_or_unknown_stops_the_run(found: float) -> None:
    same = ("float32", "float32")
    with pytest.raises(MismatchError, match=r"rollout\.mismatch_limit=0\.001"):
        check_mismatch({"mismatch/log_prob_abs_max": found}, 1e-3, 1024, same)
    check_mismatch({"mismatch/log_prob_abs_max": 1e-4}, 1e-3, 1024, same)


@pytest.mark.parametrize(
    ("dtypes", "cause"),
    [
        (("float32", "bfloat16"), "trainer computes in float32 (policy.dtype), the sampler in bfloat16 (rollout.engin"),
        (("bfloat16", "float32"), "trainer computes in bfloat16 (policy.dtype), the sampler in float32 (rollout.engin"),
        (("bfloat16", "bfloat16"), "compute in bfloat16 (policy.dtype, rollout.engine.dtype). Likely: the rounding of"),
        (("float32", "float32"), "compute in float32 (policy.dtype, rollout.engine.dtype). Likely: a lost weight sync"),
    ],
)
def test_messages_about_a_mismatch_name_both_types_and_their_keys(
    dtypes: tuple[str, str], cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(cause)):
        check_mismatch({"mismatch/log_prob_abs_max": 1.0}, 1e-3, 1024, dtypes)
    for _ in range(2):  # the warning comes once
        check_mismatch({"mismatch/t_star": 100.0}, None, 1025, dtypes)
    assert [cause in record.message for record in caplog.records] == [True]
