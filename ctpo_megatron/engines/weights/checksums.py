"""Checksums of weights that add up over parts: the trainer sums whole tensors, an engine the shards that it keeps.

The bits of a matrix are summed over rows and over columns. Each sum is multiplied by a pseudorandom weight of its row
or column, and all are added, modulo 2^64. So shards and fused matrices can be compared with whole tensors. A single
wrong number always changes the sum: it is multiplied by the weights of its row (odd) and its column (even) together.
Different numbers cannot be exchanged without changing the sum of a row or a column. If such a sum differs, the total is
equal with a probability of at most 1 in 2^40. The exception is 1 in 2^9: all wrong numbers differ in their exponents
alone, and only in every second column (four bytes) or every fourth (two). A second sum is over a few columns, which
depend on the version, for layouts that provide no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

SAMPLED = 64
"""Columns in the second sum, or all of them where there are fewer."""
_BLOCK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Bytes at once: as many as the caches of a CPU hold, as many as keep a GPU busy."""
_WORD = 8
_MODULUS = 1 << 64

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Sums = dict[str, tuple[int, int]]
"""Tensor name -> sum of all numbers, sum of the version's columns."""


def sampled_columns(version: int, width: int) -> torch.Tensor:
    """Ascending int64 indices of the columns that are compared: one of each part, another one in each version."""
    if width <= SAMPLED:
        return torch.arange(width)
    start = torch.arange(SAMPLED) * width // SAMPLED
    lengths = (torch.arange(SAMPLED) + 1) * width // SAMPLED - start
    return start + (_pseudorandom(torch.arange(SAMPLED) + SAMPLED * version) >> 16) % lengths


def checksum(part: torch.Tensor, row: int = 0, column: int = 0) -> torch.Tensor:
    """Sum of a vector or matrix, as int64 scalar on its device (compare modulo 2^64).

    row, column: where it begins in the whole tensor.
    """
    matrix = _matrix(part)
    lines = _Lines(matrix, column, matrix.dtype)
    for number, block in enumerate(matrix.split(lines.step)):
        lines.add(number, block)
    return lines.total(row)


def sampled_checksum(
    numbers: torch.Tensor, columns: torch.Tensor, row: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The same of `numbers` [rows, columns], which has these columns of the whole tensor; zeros have no sign here."""
    numbers = numbers.to(dtype or numbers.dtype) + 0.0  # no -0.0: a product with unit vectors has none
    words = numbers.view(_INTEGERS[numbers.element_size()]).to(torch.int64)
    return (words.sum(1) * _row_weights(row, len(words), words.device)).sum() + (
        words.sum(0) * _column_weights(columns.to(words.device))
    ).sum()


class _Lines:
    """Sums of the rows and columns of a matrix, which is taken in block by block.

    Numbers are summed several at a time, as they stand in words of 64 bits: a column below is one of words.
    """

    def __init__(self, matrix: torch.Tensor, column: int, dtype: torch.dtype) -> None:
        """dtype: numbers are rounded to it before their bits are summed."""
        self._dtype = dtype
        self._each = _WORD // self._dtype.itemsize
        self._lead, self._first = column % self._each, column // self._each
        self._width = -(-(self._lead + matrix.shape[1]) // self._each)
        self.step = max(1, _BLOCK[matrix.device.type] // (_WORD * max(1, self._width)))
        """Rows of a block."""
        self._of_rows = torch.empty(matrix.shape[0], dtype=torch.int64, device=matrix.device)
        self._of_blocks = self._of_rows.split(self.step)
        self._of_columns = torch.zeros(self._width, dtype=torch.int64, device=matrix.device)

    def add(self, number: int, block: torch.Tensor) -> None:
        """Take in block `number`."""
        words = self._words(block.to(self._dtype))
        torch.sum(words, 1, out=self._of_blocks[number])
        self._of_columns += words.sum(0)

    def total(self, row: int) -> torch.Tensor:
        """Of all blocks, the first row of which is number `row` of the whole tensor."""
        device = self._of_rows.device
        columns = _columns_from(self._first, self._width, device)
        return (self._of_rows * _row_weights(row, len(self._of_rows), device)).sum() + (
            self._of_columns * columns
        ).sum()

    def _words(self, block: torch.Tensor) -> torch.Tensor:
        even = not self._lead and block.shape[1] == self._width * self._each
        if not (even and block.is_contiguous() and block.data_ptr() % _WORD == 0):
            padded = block.new_zeros(block.shape[0], self._width * self._each)
            padded[:, self._lead : self._lead + block.shape[1]] = block
            block = padded
        return block.view(torch.int64)


# Both tables are read on whichever stream sums a tensor: they are complete before they are kept, and none is dropped,
# as its memory would go to the stream that made it while another still reads it. Layers have the same shapes, so there
# are few.
@cache
def _row_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Odd."""
    return _complete(_pseudorandom(torch.arange(first, first + count, device=device)) | 1)


@cache
def _columns_from(first: int, count: int, device: torch.device) -> torch.Tensor:
    return _complete(_column_weights(torch.arange(first, first + count, device=device)))


def _complete(table: torch.Tensor) -> torch.Tensor:
    """The same, which the host has waited for."""
    if table.is_cuda:
        torch.cuda.current_stream(table.device).synchronize()
    return table


def _column_weights(columns: torch.Tensor) -> torch.Tensor:
    """Even."""
    return _pseudorandom(-2 - columns) & -2


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

    def add(self, name: str, tensor: torch.Tensor, into: torch.Tensor | None = None, row: int = 0) -> None:
        """Sum a whole tensor of any device, or its rows from `row`; the first of more than two dimensions are rows.

        into: where it is copied to on the way, of the same shape and dtype.
        """
        matrix = _matrix(tensor.detach())
        target = None if into is None else _matrix(into)
        columns = sampled_columns(self.version, matrix.shape[1]).to(matrix.device)
        sampled = matrix.new_empty(matrix.shape[0], len(columns))
        lines = _Lines(matrix, 0, self.dtype)
        targets, places = target.split(lines.step) if target is not None else None, sampled.split(lines.step)
        for number, block in enumerate(matrix.split(lines.step)):  # each is read from memory once
            if targets is not None:
                targets[number].copy_(block)
            lines.add(number, block)
            torch.index_select(block, 1, columns, out=places[number])
        self._pending[name] = (lines.total(row), sampled_checksum(sampled, columns, row, dtype=self.dtype))

    @property
    def sums(self) -> Sums:
        """By tensor name."""
        return {name: (int(whole), int(sampled)) for name, (whole, sampled) in self._pending.items()}


def total_of(parts: Iterable[Sums]) -> Sums:
    """Sums of whole tensors, from the sums of their rows on several ranks."""
    totals: dict[str, tuple[int, int]] = {}
    for sums in parts:
        for name, found in sums.items():
            whole, sampled = totals.get(name, (0, 0))
            totals[name] = (_wrapped(whole + found[0]), _wrapped(sampled + found[1]))
    return totals


def _wrapped(total: int) -> int:
    """As int64 holds it."""
    return (total + _MODULUS // 2) % _MODULUS - _MODULUS // 2


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


def _pseudorandom(index: torch.Tensor) -> torch.Tensor:
    """int64 of int64, the same on every device: the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (index + 1) * -7046029254386353131
    value = (value ^ _shifted(value, 30)) * -4658895280553007687
    value = (value ^ _shifted(value, 27)) * -7723592293110705685
    return _shifted(value, 31) ^ value


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, filled with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
