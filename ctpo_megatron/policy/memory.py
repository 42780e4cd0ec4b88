"""The trainer's device memory: acquired before work, offloaded while engines sample on the same GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.optimizer import ChainedOptimizer

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import device
from ctpo_megatron.policy.model import BuiltModel

SLAB_BYTES = 1 << 28
"""torch rounds pinned memory up to a power of two: one buffer for each tensor would take up to twice as much."""


class DeviceMemory:
    """`policy.offload`: optimizer state (and parameters) move to host memory, gradient buffers are freed.

    Only state that the distributed optimizer holds separately from the parameters can move: master weights and moments
    of a 16-bit model. Methods may be called at any time. The optimizer's own `offload_to_cpu` takes new pageable memory
    each time, at 2 GB/s on an H200 (benchmarks/results/gpu/nvidia-h200.md). Parameter buffers pin theirs whole, which
    torch rounds up to a power of two. Here tensors move through slabs of pinned memory, which are kept.
    """

    def __init__(self, config: PolicyConfig, model: BuiltModel) -> None:
        self._what = config.offload
        self._model = model
        self._released = False
        self._slabs: list[torch.Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []  # and its bytes

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which everything is on the device, for passes of the model. Does not nest."""
        with device.scope():
            self._reclaim()
        yield

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """As `on_device`, and all of megatron-core can be called."""
        with self.on_device(), device.scope():
            yield

    @contextmanager
    def weights_complete(self) -> Iterator[None]:
        """As `in_use`, with every parameter complete for readers on any stream.

        Only the current stream waits for the gather of `overlap_param_gather`, and vLLM's NCCL producer reads on
        streams of its own. The same holds for the copies of a reclaim.
        """
        with self.in_use():
            self._model.finish_param_gather()
            device.synchronize()
            yield

    def release(self, optimizer: ChainedOptimizer | None) -> None:
        """Release the memory, after any unfinished gather of parameters. optimizer: the current one, if any.

        Raises MemoryError when the host has no more to pin; then all stays on the device.
        """
        if self._what == "none" or self._released:
            return
        with device.scope():
            self._model.finish_param_gather()
            self._take([*self._parameters(), *(_tensors(optimizer) if optimizer is not None else ())])
            for chunk in self._model.wrapped:
                chunk.offload_grad_buffers()
            device.release_cached_memory()
        self._released = True

    def _reclaim(self) -> None:
        """Move everything back to the device, on the current stream. Gradients are zero."""
        if not self._released:
            return
        for storage, size in self._taken:
            storage.resize_(size)
        for there, here in self._pieces(self._taken):
            there.copy_(here, non_blocking=True)
        self._taken = []
        for chunk in self._model.wrapped:
            chunk.restore_grad_buffers()
        self._released = False

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy to the host and free the device memory; returns when both are done.

        A tensor that shares its storage stays where it is, or the others would lose theirs.
        """
        taken = [(each.untyped_storage(), each.untyped_storage().nbytes()) for each in tensors if _is_whole(each)]
        for there, here in self._pieces(taken):
            here.copy_(there, non_blocking=True)
        device.synchronize()
        for storage, _ in taken:
            storage.resize_(0)
        self._taken = taken

    def _pieces(self, taken: Sequence[tuple[torch.UntypedStorage, int]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes on the device, and their place on the host."""
        offset = 0
        for storage, size in taken:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            start = 0
            while start < size:
                number, at = divmod(offset, SLAB_BYTES)
                if number == len(self._slabs):
                    self._slabs.append(self._slab())
                count = min(size - start, SLAB_BYTES - at)
                yield whole[start : start + count], self._slabs[number][at : at + count]
                start, offset = start + count, offset + count

    def _slab(self) -> torch.Tensor:
        try:
            return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=device.CUDA)
        except RuntimeError as error:
            raise MemoryError(
                f"policy.offload: no more pinned host memory after {len(self._slabs) * SLAB_BYTES >> 20} MiB of this "
                f"rank ({error}); give the job more memory, or set policy.offload=none"
            ) from error

    def _parameters(self) -> Iterator[torch.Tensor]:
        """Buffers that the parameters are views of, as far as they move."""
        if self._what == "all":
            for chunk in self._model.wrapped:
                yield from (buffer.param_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)


def _tensors(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Master weights and moments on the device."""
    for each in optimizer.chained_optimizers:
        if (inner := each.optimizer) is None or each.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in inner.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.is_cuda)
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.is_cuda)


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() > 0
