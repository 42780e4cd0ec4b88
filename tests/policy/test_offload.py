"""Memory that is given back while the engines sample is gone, and comes back with its content."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import Layout, Trainer
from tests.policy import models
from tests.policy.steps import LOSS, has_weights, weights


def buffer_bytes(policy: Trainer) -> tuple[int, int]:
    """Of parameters and of gradients."""
    buffers = [buffer for chunk in policy._model.wrapped for buffer in chunk.buffers]
    sizes = [[data.untyped_storage().size() for data in (b.param_data, b.grad_data)] for b in buffers]
    return sum(p for p, _ in sizes), sum(g for _, g in sizes)


@pytest.mark.parametrize(
    ("offload", "gone"), [("none", (False, False)), ("optimizer", (False, True)), ("all", (True, True))]
)
def test_buffers_are_gone_until_they_are_needed(
    offload: str, gone: tuple[bool, bool], layout: Layout, model: Path
) -> None:
    config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=True, offload=offload)
    policy = Trainer(config, layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=4)
    before = weights(policy)
    held = buffer_bytes(policy)
    assert all(held)
    policy.release()
    policy.release()
    assert tuple(size == 0 for size in buffer_bytes(policy)) == gone
    kept = [buffer.param_data_cpu for chunk in policy._model.wrapped for buffer in chunk.buffers]
    assert kept == [None] * len(kept)  # pinned whole, a buffer takes up to twice its size of the host
    assert has_weights(policy, before)
    assert buffer_bytes(policy) == held
    (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
    policy.release()
    policy.compute_old_log_probs([mini_batch])
    policy.update(mini_batch, LOSS)
    assert not has_weights(policy, before)
