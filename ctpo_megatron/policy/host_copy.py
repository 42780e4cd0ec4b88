"""Tensors of a GPU that wait in pinned host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ctpo_megatron.policy import device

SLAB_BYTES = 1 << 28
"""torch rounds pinned memory up to a power of two: one buffer for each tensor would take up to twice as much."""


class HostCopy:
    """Moves tensors to host memory and back, as fast as the bus; the host memory is kept for the next time.

    A tensor that shares its storage stays where it is, or the others would lose theirs. Between `take` and `restore`
    the tensors exist without their numbers.
    """

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._taken: list[tuple[torch.UntypedStorage, int]] = []  # and its bytes

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy to the host and free the device memory; returns when both are done.

        Raises RuntimeError if others wait, MemoryError when the host has no more to pin; then all stays on the device.
        """
        if self._taken:
            raise RuntimeError("the tensors before these were not restored")
        taken = [(each.untyped_storage(), each.untyped_storage().nbytes()) for each in tensors if _is_whole(each)]
        for there, here in self._pieces(taken):
            here.copy_(there, non_blocking=True)
        device.synchronize()
        for storage, _ in taken:
            storage.resize_(0)
        self._taken = taken

    def restore(self) -> None:
        """Copy everything back, on the current stream."""
        for storage, size in self._taken:
            storage.resize_(size)
        for there, here in self._pieces(self._taken):
            there.copy_(here, non_blocking=True)
        self._taken = []

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


def _is_whole(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() > 0
