"""Tensors that wait in host memory come back bit for bit, and the host memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctpo_megatron.policy import host_copy
from ctpo_megatron.policy.host_copy import HostCopy


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "SLAB_BYTES", 64)


def tensors(seed: int) -> list[torch.Tensor]:
    """Smaller than a slab, larger than two, empty, of one byte, of no dimension."""
    generator = torch.Generator().manual_seed(seed)
    dtypes = {5: torch.float32, 50: torch.float64, 0: torch.float32, 33: torch.bfloat16}
    made = [torch.randn(size, generator=generator).to(dtype) for size, dtype in dtypes.items()]
    return [*made, torch.tensor([seed], dtype=torch.uint8), torch.tensor(float(seed)), made[1].new_ones(3, 7).t()]


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


def test_a_tensor_that_shares_its_storage_stays() -> None:
    whole = torch.arange(40.0)
    copy = HostCopy()
    copy.take([whole[:20], whole[20:]])
    assert whole.sum() == 780.0
    copy.restore()
    assert whole.sum() == 780.0


def test_what_waits_is_not_overwritten() -> None:
    copy, (first, *_) = HostCopy(), tensors(1)
    copy.take([first])
    with pytest.raises(RuntimeError, match="were not restored"):
        copy.take(tensors(2))
    copy.restore()
    assert torch.equal(first, tensors(1)[0])
    copy.restore()  # nothing waits


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
