"""A rank's tensors of one version in anonymous shared memory, which the next version takes over."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import IO

import torch

Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype (as torch names it), shape, first byte, bytes."""

_GROWTH = 64 << 20
"""More bytes than needed, which take memory once they are written."""


class WeightMemory:
    """Bytes of tensors one after another, in a file without a name that ends with the process.

    Pages are used again: to write to new ones takes several times as long, and two versions would take memory.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ctpo-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._map = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self.version = -1
        self.entries: list[Entry] = []
        self.size = 0

    def fill(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Hold these tensors (of any device and layout) instead of the former; each is copied once."""
        self.version, self.entries, self.size = version, [], 0
        for name, tensor in named_tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.entries.append((name, dtype, tuple(tensor.shape), self.size, tensor.nbytes))
            self._append(tensor)
            del tensor  # or it would stay while the next one is gathered

    def reopened(self) -> IO[bytes]:
        """The file, for the caller to close; it outlives this object."""
        return os.fdopen(os.dup(self._descriptor), "rb")

    def close(self) -> None:
        """Release the memory, but for what is being sent."""
        self._map.close()
        os.close(self._descriptor)

    def _append(self, tensor: torch.Tensor) -> None:
        end = self.size + tensor.nbytes
        if end > len(self._map):
            self._map.resize(end + _GROWTH)
        if tensor.nbytes:
            place = torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes, offset=self.size)
            place.copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        self.size = end
