"""Memory that is given back while the engines sample is gone, and comes back with its content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import Layout, Trainer, memory
from ctpo_megatron.policy.memory import HostCopy
from tests.policy import models
from tests.policy.stepping import LOSS, has_weights, weights


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


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SLAB_BYTES", 64)


def tensors(seed: int) -> list[torch.Tensor]:
    """Smaller than a slab, larger than two, empty, of one byte, of no dimension."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {5: torch.float32, 50: torch.float64, 0: torch.float32, 33: torch.bfloat16}
    made = [torch.randn(size, generator=generator).to(dtype) for size, dtype in dtypes.items()]
    return [*made, torch.tensor([seed], dtype=torch.uint8), torch.tensor(float(seed)), made[1].new_ones(3, 7).t()]


@pytest.mark.usefixtures("small_slabs")
def test_everything_comes_back_and_host_memory_is_used_again() -> None:
    copy, held = HostCopy(), set()
    for seed in (1, 2, 3):
        moved, wanted = tensors(seed), tensors(seed)
        copy.take(moved)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moved)
        held.add(tuple(slab.data_ptr() for slab in copy._slabs))
        copy.restore()
        assert all(torch.equal(*pair) for pair in zip(moved, wanted, strict=True))
    assert len(held) == 1


@pytest.mark.usefixtures("small_slabs")
def test_a_tensor_that_shares_its_storage_stays() -> None:
    whole = torch.arange(40.0)
    copy = HostCopy()
    copy.take([whole[:20], whole[20:]])
    assert whole.sum() == 780.0
    copy.restore()
    assert whole.sum() == 780.0


@pytest.mark.usefixtures("small_slabs")
def test_what_waits_is_not_overwritten() -> None:
    copy, (first, *_) = HostCopy(), tensors(1)
    copy.take([first])
    with pytest.raises(RuntimeError, match="were not restored"):
        copy.take(tensors(2))
    copy.restore()
    assert torch.equal(first, tensors(1)[0])
    copy.restore()  # nothing waits


@pytest.mark.usefixtures("small_slabs")
def test_without_host_memory_everything_stays_and_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    copy, moved = HostCopy(), tensors(1)
    empty, made = torch.empty, []

    def full(*size: int, **options: Any) -> torch.Tensor:
        if size == (64,) and len(made) == 2:
            raise RuntimeError("CUDA error: out of memory")
        made.extend([size] if size == (64,) else [])
        return empty(*size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(MemoryError, match=r"policy\.offload: no more pinned host memory .* policy\.offload=none"):
            copy.take(moved)
    assert all(torch.equal(*pair) for pair in zip(moved, tensors(1), strict=True))
    copy.take(moved)  # once there is
    copy.restore()
    assert all(torch.equal(*pair) for pair in zip(moved, tensors(1), strict=True))
