"""Consecutive rows of a tensor: the unit in which trainer ranks distribute what they send to the engines."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class TensorRows(NamedTuple):
    """Rows `first` to `first + rows` of a tensor under its Hugging Face name.

    shape, dtype: of the whole tensor. The rows of a vector or a scalar are its numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int
    rows: int

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> TensorRows:
        """All rows."""
        return cls(name, shape, dtype, 0, rows_of(shape))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of these rows alone."""
        return (self.rows, *self.shape[1:]) if self.shape else ()


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows of a tensor of this shape."""
    return shape[0] if shape else 1
