"""What an engine fetches at once: buckets of whole tensors, put together from the rows that the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch

ALIGNED = 64
"""Every tensor begins at a multiple of this many bytes, in a rank's memory and in a bucket."""


class Entry(NamedTuple):
    """Consecutive rows of a tensor in a rank's memory.

    dtype: as torch names it. shape: of the whole tensor. start: their first byte in the tensor. first: in the memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    first: int
    size: int


@dataclass(frozen=True)
class Share:
    """What one rank serves, and where."""

    host: str
    port: int
    entries: Sequence[Entry]


class Tensor(NamedTuple):
    """A whole tensor, and its place in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    place: int
    size: int


class Piece(NamedTuple):
    """`size` bytes from byte `first` of the memory of a rank, which belong at `place` of a bucket. share: number of the
    rank's share."""

    share: int
    first: int
    size: int
    place: int

    def joined(self, other: Piece) -> Piece | None:
        """Both as one, where `other` follows in the rank's memory as it does in the bucket."""
        distance = other.place - self.place
        adjoins = 0 <= distance - self.size < ALIGNED and other.first - self.first == distance
        return self._replace(size=distance + other.size) if self.share == other.share and adjoins else None


@dataclass
class Bucket:
    """Consecutive tensors, and where they come from."""

    tensors: list[Tensor] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    size: int = 0

    def add(self, source: _Source) -> None:
        """Take in one more tensor."""
        name, dtype, shape = source.entries[0][1][:3]
        place = aligned(self.size)
        self.tensors.append(Tensor(name, dtype, shape, place, source.size))
        for share, entry in source.entries:
            if entry.size:
                self._append(Piece(share, entry.first, entry.size, place + entry.start))
        self.size = place + source.size

    def _append(self, piece: Piece) -> None:
        longer = self.pieces[-1].joined(piece) if self.pieces else None
        if longer is None:
            self.pieces.append(piece)
        else:
            self.pieces[-1] = longer


class _Source(NamedTuple):
    """A tensor where it is held: numbers of shares with their entries, by the place in the tensor."""

    layer: int
    entries: list[tuple[int, Entry]]

    @property
    def size(self) -> int:
        return sum(entry.size for _, entry in self.entries)

    @property
    def order(self) -> tuple[int, int, int]:
        share, entry = self.entries[0]
        return self.layer, share, entry.first


def aligned(size: int) -> int:
    """The next multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED


def plan(shares: Sequence[Share], bucket_bytes: int) -> list[Bucket]:
    """All tensors in buckets of `bucket_bytes` at most, or of one tensor, layer by layer, of each rank in its order.

    vLLM keeps tensors of a layer until it has all of them, which may come from several ranks. A rank may still be
    copying, in its order; what is of no layer comes where it stands. Raises ValueError naming a tensor of which rows
    are missing, or held twice.
    """
    found: dict[str, _Source] = {}
    for number, share in enumerate(shares):
        layer = -1
        for entry in share.entries:
            layer = _layer(entry.name, layer)
            found.setdefault(entry.name, _Source(layer, [])).entries.append((number, entry))
    for source in found.values():
        source.entries.sort(key=lambda each: (each[1].start, each[1].size))
        _check(source)
    buckets: list[Bucket] = []
    for source in sorted(found.values(), key=attrgetter("order")):
        if not buckets or aligned(buckets[-1].size) + source.size > bucket_bytes:
            buckets.append(Bucket())
        buckets[-1].add(source)
    return buckets


def rotated(buckets: Sequence[Bucket], number: int, of: int) -> list[int]:
    """Numbers of all buckets, in the order in which receiver `number` of `of` takes them.

    Each begins at another place, equally far apart in bytes, so that they do not all ask the same ranks first.
    """
    start = passed = 0
    total = sum(bucket.size for bucket in buckets)
    while passed * of < total * number:
        passed += buckets[start].size
        start += 1
    return [*range(start, len(buckets)), *range(start)]


def _check(source: _Source) -> None:
    """The entries are the whole tensor."""
    name, dtype, shape = source.entries[0][1][:3]
    whole = prod(shape) * dtype_of(dtype).itemsize
    starts = [entry.start for _, entry in source.entries]
    ends = [entry.start + entry.size for _, entry in source.entries]
    if [*starts, whole] != [0, *ends]:
        held = ", ".join(f"{start} to {end}" for start, end in zip(starts, ends, strict=True))
        raise ValueError(f"weights: of the {whole} bytes of {name} the ranks hold {held}, which is not each byte once")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch names so."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _layer(name: str, default: int) -> int:
    """Number of the layer that a tensor is of; `default` of those in none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), default)
