"""A rank's tensors of one version in one piece of memory, which the next version takes over."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ctpo_megatron.engines.weights.checksums import Checksums

Entry = tuple[str, str, tuple[int, ...], int, int]
"""Name, dtype (as torch names it), shape, first byte, bytes."""

ALIGNED = 64
"""Every tensor begins at a multiple of this many bytes."""


class WeightMemory:
    """Bytes of tensors one after another.

    Pages are used again: to write to new ones takes several times as long, and two versions would take memory. One
    thread plans and fills; others wait for what they want of it.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._progress = threading.Condition()
        self._filled = 0
        self.version = -1
        self.entries: list[Entry] = []

    def plan(self, shapes: Iterable[tuple[str, tuple[int, ...], torch.dtype]], version: int) -> None:
        """From now on there is space for these tensors of `version`, instead of the former."""
        entries, end = [], 0
        for name, shape, dtype in shapes:
            start, size = -(-end // ALIGNED) * ALIGNED, torch.Size(shape).numel() * dtype.itemsize
            entries.append((name, str(dtype).removeprefix("torch."), tuple(shape), start, size))
            end = start + size
        with self._progress:
            self.version, self.entries, self._filled = version, entries, 0
            self._progress.notify_all()
        if end > len(self._map):
            # The former one stays as long as bytes of it are being sent.
            self._map = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._map.madvise(mmap.MADV_DONTFORK)  # a forked writer of checkpoints would have it copied as it is filled
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)

    def fill(self, named_tensors: Iterable[tuple[str, torch.Tensor]], checksums: Checksums | None = None) -> None:
        """Copy the planned tensors (of any device and layout) in that order; each can be had once it is there.

        checksums: takes them in on the way. Raises ValueError when one is not as planned, or missing.
        """
        planned = iter(self.entries)
        for name, tensor in named_tensors:
            entry = next(planned, None)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if entry is None or entry[:3] != (name, dtype, tuple(tensor.shape)):
                raise ValueError(f"weights: {name} {dtype}{list(tensor.shape)} comes where {entry} was announced")
            place = self._place(entry, tensor.dtype)
            if checksums is None:
                place.copy_(tensor.detach())
            else:
                checksums.add(name, tensor, place)
            with self._progress:
                self._filled = entry[3] + entry[4]
                self._progress.notify_all()
            del tensor  # or it would stay while the next one is gathered
        if (missing := next(planned, None)) is not None:
            raise ValueError(f"weights: {missing[0]} was announced, but did not come")

    def wait_for(self, version: int, end: int, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the bytes before `end` of `version`; returns whether they are there."""
        with self._progress:
            self._progress.wait_for(lambda: self.version != version or self._filled >= end, timeout_s)
            return self.version == version and self._filled >= end

    def content(self, first: int, size: int) -> memoryview:
        """`size` bytes from `first`. They outlive this object; later versions take their place."""
        return memoryview(self._map)[first : first + size]

    def close(self) -> None:
        """Release the memory, but for what is being sent."""
        self._map = mmap.mmap(-1, mmap.PAGESIZE)

    def _place(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        shape = torch.Size(entry[2])
        if not entry[4]:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=shape.numel(), offset=entry[3]).view(shape)
