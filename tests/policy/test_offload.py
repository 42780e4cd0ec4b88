"""Memory that is given back while the engines sample is gone, and comes back with its content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import Layout, Trainer
from tests.policy import models
from tests.policy.stepping import LOSS, has_weights, weights


def buffer_bytes(policy: Trainer) -> tuple[int, int]:
    """Of parameters and of gradients."""
    buffers = [buffer for chunk in policy._model.wrapped for buffer in chunk.buffers]
    sizes = [[data.untyped_storage().size() for data in (b.param_data, b.grad_data)] for b in buffers]
    return sum(p for p, _ in sizes), sum(g for _, g in sizes)


def offloading(layout: Layout, model: Path, offload: str = "all") -> tuple[Trainer, dict[str, torch.Tensor]]:
    """A trainer, and its weights."""
    config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=True, offload=offload)
    policy = Trainer(config, layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=4)
    return policy, weights(policy)


@pytest.mark.parametrize(
    ("offload", "gone"), [("none", (False, False)), ("optimizer", (False, True)), ("all", (True, True))]
)
def test_buffers_are_gone_until_they_are_needed(
    offload: str, gone: tuple[bool, bool], layout: Layout, model: Path
) -> None:
    policy, before = offloading(layout, model, offload)
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


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of host memory: smaller than most tensors, and of no dtype's size."""
    monkeypatch.setattr("ctpo_megatron.policy.device.SLAB_BYTES", 1021)
    return 1021


def test_tensors_of_any_size_come_back(layout: Layout, model: Path, small_slabs: int) -> None:
    policy, before = offloading(layout, model)
    for _ in range(3):
        policy.release()
        assert has_weights(policy, before)
    assert sum(buffer_bytes(policy)) > 100 * small_slabs


def test_without_host_memory_everything_stays_and_the_message_says_what_to_do(
    layout: Layout, model: Path, small_slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, before = offloading(layout, model)
    held, empty, made = buffer_bytes(policy), torch.empty, []

    def full(*size: int, **options: Any) -> torch.Tensor:
        if size == (small_slabs,) and len(made) == 2:
            raise RuntimeError("CUDA error: out of memory")
        made.extend([size] if size == (small_slabs,) else [])
        return empty(*size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(MemoryError, match=r"policy\.offload: no more pinned host memory .* policy\.offload=none"):
            policy.release()
    assert buffer_bytes(policy) == held and has_weights(policy, before)
    policy.release()  # once there is
    assert sum(buffer_bytes(policy)) == 0
    assert has_weights(policy, before)
