"""Memory that is given back while the engines sample is gone, and comes back with its content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Layout, Trainer, destroy_distributed, init_distributed, policy_gradient
from tests.policy import models


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield init_distributed(PolicyConfig(), seed=0)
    destroy_distributed()


def buffer_bytes(policy: Trainer) -> tuple[int, int]:
    """Of parameters and of gradients."""
    buffers = [buffer for chunk in policy._model.wrapped for buffer in chunk.buffers]
    sizes = [[data.untyped_storage().size() for data in (b.param_data, b.grad_data)] for b in buffers]
    return sum(p for p, _ in sizes), sum(g for _, g in sizes)


@pytest.mark.parametrize(
    ("offload", "gone"), [("none", (False, False)), ("optimizer", (False, True)), ("all", (True, True))]
)
def test_buffers_are_gone_until_they_are_needed(
    offload: str, gone: tuple[bool, bool], layout: Layout, tmp_path: Path
) -> None:
    models.build("qwen3-tied", tmp_path)
    config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=True, offload=offload)
    policy = Trainer(config, layout, tmp_path, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=4)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    held = buffer_bytes(policy)
    assert all(held)
    policy.release()
    policy.release()
    assert tuple(size == 0 for size in buffer_bytes(policy)) == gone
    kept = [buffer.param_data_cpu for chunk in policy._model.wrapped for buffer in chunk.buffers]
    assert kept == [None] * len(kept)  # pinned whole, a buffer takes up to twice its size of the host
    for name, tensor in policy.weights():
        assert torch.equal(tensor, before[name]), name
    assert buffer_bytes(policy) == held
    (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
    policy.release()
    policy.compute_old_log_probs([mini_batch])
    policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.weights())
