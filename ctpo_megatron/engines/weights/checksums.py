"""Sums of tensors, taken where they are sent and where they arrive, and compared at every update.

The bytes of a tensor are words of 64 bits in rows of a fixed width. Words are summed over rows and over columns; each
sum is multiplied by a pseudorandom weight of its row or column, and all are added modulo 2^64. A single wrong word
always changes the total: it is multiplied by the weights of its row (odd) and its column (even) together. Words cannot
be exchanged without changing the sum of a row or a column; then the total is equal by chance only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import torch

_WIDTH = 1 << 10
"""Words of a row."""
_ROW_BYTES = 8 * _WIDTH
_BLOCK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Bytes at once: as many as the caches of a CPU hold, as many as keep a GPU busy."""

Sums = dict[str, tuple[int, int]]
"""Name of a tensor -> its bytes, and the sum of its words."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor of any dtype, shape and device, as an int64 scalar on its device."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = len(data) - len(data) % _ROW_BYTES
    blocks = [*data[:whole].split(max(_ROW_BYTES, _BLOCK[data.device.type])), data[whole:]]
    columns = torch.zeros(_WIDTH, dtype=torch.int64, device=data.device)
    total, first = columns.new_zeros(()), 0
    for block in blocks:
        words = _words(block)
        total += (words.sum(1) * _row_weights(first, len(words), words.device)).sum()
        columns += words.sum(0)
        first += len(words)
    return total + (columns * _column_weights(data.device)).sum()


def _words(block: torch.Tensor) -> torch.Tensor:
    """Return bytes as int64 `[rows, _WIDTH]`, padded with zeros; no copy of whole rows that are aligned."""
    rows = -(-len(block) // _ROW_BYTES)
    if len(block) < rows * _ROW_BYTES or block.storage_offset() % 8:
        padded = block.new_zeros(rows * _ROW_BYTES)
        padded[: len(block)] = block
        block = padded
    return block.view(torch.int64).view(rows, _WIDTH)


# Tables are read on whichever stream sums a tensor: they are complete before they are kept, and none is dropped, as its
# memory would go to the stream that made it while another still reads it. Layers have the same shapes: there are few.
@cache
def _row_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return odd weights of rows."""
    return _complete(_pseudorandom(torch.arange(first, first + count, device=device)) | 1)


@cache
def _column_weights(device: torch.device) -> torch.Tensor:
    """Return even weights of columns."""
    return _complete(_pseudorandom(-2 - torch.arange(_WIDTH, device=device)) & -2)


def _complete(table: torch.Tensor) -> torch.Tensor:
    """Return the same table once the host has waited for it."""
    if table.is_cuda:
        torch.cuda.current_stream(table.device).synchronize()
    return table


def _pseudorandom(index: torch.Tensor) -> torch.Tensor:
    """Map int64 to int64, the same on every device: the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (index + 1) * -7046029254386353131
    value = (value ^ _shifted(value, 30)) * -4658895280553007687
    value = (value ^ _shifted(value, 27)) * -7723592293110705685
    return _shifted(value, 31) ^ value


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right, filled with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


class Checksums:
    """Sums of the tensors of one version, whose numbers stay on their device until they are read."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[int, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Sum a whole tensor. Raises ValueError for a name that was added before."""
        if name in self._pending:
            raise ValueError(f"weights: {name} came twice")
        self._pending[name] = (tensor.nbytes, checksum(tensor))

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same tensors, one at a time, which are summed as they pass."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor
            del tensor  # or it would stay while the next one is gathered

    def sums(self) -> Sums:
        """Return all sums so far."""
        return {name: (size, int(total)) for name, (size, total) in self._pending.items()}


def different(sent: Mapping[str, tuple[int, int]], received: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the names of tensors that one side has and the other has not, or has with another sum."""
    return sorted(name for name in sent.keys() | received.keys() if sent.get(name) != received.get(name))
