"""Checksums of weights that add up over parts: the trainer sums whole tensors, an engine the shards that it keeps.

The sum of a matrix is that of its numbers' bits, each times a pseudorandom odd weight of its row and one of its column,
modulo 2^64. So shards and fused matrices can be compared to whole tensors, and a number, row or tensor at another place
makes another sum. A second sum is over a few columns, those of the version, for layouts that give no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

SAMPLED = 64
"""Columns in the second sum, or all of them where there are fewer."""
_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Numbers at once: as many as the caches of a CPU hold, as many as keep a GPU busy."""
_MODULUS = 1 << 64

Sums = dict[str, tuple[int, int]]
"""Tensor name -> sum of all numbers, sum of the version's columns."""


def sampled_columns(version: int, width: int) -> torch.Tensor:
    """Ascending int64 indices of the columns that `version` looks at: one, at another place each time, of each part."""
    if width <= SAMPLED:
        return torch.arange(width)
    start = torch.arange(SAMPLED) * width // SAMPLED
    lengths = (torch.arange(SAMPLED) + 1) * width // SAMPLED - start
    return start + (_pseudorandom(torch.arange(SAMPLED) + SAMPLED * version) >> 16) % lengths


def checksum(
    part: torch.Tensor, row: int = 0, columns: torch.Tensor | int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum of a vector or matrix, as int64 scalar on its device (compare modulo 2^64).

    row, columns: where it begins in the whole tensor, or which columns it has of it. dtype: whose bits are summed,
    after rounding; None: of the part. Zeros have no sign here.
    """
    matrix = _matrix(part)
    dtype = dtype or part.dtype
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    of_row = _pseudorandom(_places(row, matrix.shape[0], part.device)) | 1
    of_column = (_pseudorandom(_places(columns, matrix.shape[1], part.device)) & 0x7FFFFFFF | 1).to(torch.int32)
    step = max(1, _BLOCK[part.device.type] // max(1, matrix.shape[1]))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, matrix.shape[0], step):
        block = (matrix[start : start + step].to(dtype) + 0.0).view(bits).to(torch.int32)
        total += ((block * of_column).sum(dim=1, dtype=torch.int64) * of_row[start : start + step]).sum()
    return total


@dataclass
class Checksums:
    """Sums of the tensors of one version, in the precision of the engines; filled by `watch` or `add`."""

    version: int
    dtype: torch.dtype
    _pending: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def watch(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, one at a time, which are summed as they pass."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor
            del tensor  # or it would stay while the next one is gathered

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Sum a whole tensor of any device; of more than two dimensions, the first are its rows."""
        tensor = _matrix(tensor.detach())
        columns = sampled_columns(self.version, tensor.shape[1]).to(tensor.device)
        self._pending[name] = (
            checksum(tensor, dtype=self.dtype),
            checksum(tensor[:, columns], 0, columns, dtype=self.dtype),
        )

    @property
    def sums(self) -> Sums:
        """By tensor name."""
        return {name: (int(whole), int(sampled)) for name, (whole, sampled) in self._pending.items()}


@dataclass(frozen=True)
class Part:
    """The sum of what one worker of an engine keeps of a tensor.

    copy: parts of the same copy make the whole tensor. sampled: of the version's columns only.
    """

    name: str
    copy: str
    sampled: bool
    total: int


def differences(parts: Iterable[Part], sums: Sums) -> tuple[list[str], list[str]]:
    """Names of tensors of which an engine keeps something else than was sent; names that no part is of."""
    totals: dict[tuple[str, str, bool], int] = defaultdict(int)
    for part in parts:
        totals[part.name, part.copy, part.sampled] += part.total
    wrong = {
        name
        for (name, _, sampled), total in totals.items()
        if name not in sums or (total - sums[name][sampled]) % _MODULUS
    }
    return sorted(wrong), sorted(sums.keys() - {name for name, *_ in totals})


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def _places(where: torch.Tensor | int, count: int, device: torch.device) -> torch.Tensor:
    if isinstance(where, torch.Tensor):
        return where.to(device)
    return torch.arange(where, where + count, device=device)


def _pseudorandom(index: torch.Tensor) -> torch.Tensor:
    """int64 of int64, the same on every device: the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (index + 1) * -7046029254386353131
    value = (value ^ _shifted(value, 30)) * -4658895280553007687
    value = (value ^ _shifted(value, 27)) * -7723592293110705685
    return _shifted(value, 31) ^ value


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
