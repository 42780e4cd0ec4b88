"""Prefix trees of a micro-batch: tokens with the same history are one row, which is computed once.

Sequences in the order of their tokens are a depth-first walk through the forest of their prefixes. What each of them
shares with the one before gives the row of every token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
T = TypeVar("T")


class PrefixSegment(NamedTuple):
    """Rows `start` to `stop` of one path without a branch. parent: the segment that it follows, by number; -1: none.

    end: behind the rows of all segments below it.
    """

    start: int
    stop: int
    parent: int
    end: int


@dataclass(frozen=True, eq=False)
class Forest:
    """Distinct prefixes of a batch of N tokens as n rows, depth first.

    row: `[N]`, the row of each token. first: `[n]`, a token of each row. distinct: rows that are of a token. segments:
    in the order of their rows, so that parents come before children.
    """

    row: Ints
    first: Ints
    distinct: int
    segments: tuple[PrefixSegment, ...]
    _derived: dict[type, Any] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> int:
        """n."""
        return len(self.first)

    def derive(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return what `make` makes of the forest, made once for all passes over the batch."""
        if kind not in self._derived:
            self._derived[kind] = make()
        made: T = self._derived[kind]
        return made

    @classmethod
    def of(cls, token_ids: NDArray[np.integer], bounds: Sequence[int], multiple: int = 1) -> Forest:
        """Return the forest of the sequences between consecutive `bounds` of token ids `[N]`.

        multiple: of the number of rows; rows that no token has are appended, each a tree of its own.
        """
        spans = [(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start]
        keys = token_ids.astype(">u4")
        spans.sort(key=lambda span: keys[slice(*span)].tobytes())
        row = np.empty(len(token_ids), np.int64)
        first, starts, attached, count = list[Ints](), list[int](), list[int](), 0
        before = slice(0, 0)
        for start, stop in spans:
            shared = common_prefix(keys[before], keys[start:stop])
            row[start : start + shared] = row[before.start : before.start + shared]
            own = stop - start - shared
            row[start + shared : stop] = np.arange(count, count + own)
            if own:
                first.append(np.arange(start + shared, stop))
                starts.append(count)
                attached.append(int(row[start + shared - 1]) if shared else -1)
            count += own
            before = slice(start, stop)
        filler = -count % multiple
        first.append(np.full(filler, spans[0][0] if spans else 0))
        starts += range(count, count + filler)
        attached += [-1] * filler
        return cls(row, np.concatenate(first), count, _segments(starts, attached, count + filler))


@dataclass(frozen=True)
class PrefixOrder:
    """The sequences of a step in the order of their tokens.

    place: `[B]`, of each sequence in that order. shared: `[B]`, by place: tokens that it shares with the one before.
    """

    place: Ints
    shared: Ints

    @classmethod
    def of(cls, sequences: Sequence[NDArray[np.integer]]) -> PrefixOrder:
        """Return the order of sequences of token ids."""
        keys = [ids.astype(">u4") for ids in sequences]
        order = sorted(range(len(keys)), key=lambda index: keys[index].tobytes())
        place = np.empty(len(keys), np.int64)
        place[order] = np.arange(len(keys))
        pairs = itertools.pairwise(order)
        return cls(place, np.array([0, *(common_prefix(keys[a], keys[b]) for a, b in pairs)][: len(keys)], np.int64))

    def walk(self, members: Sequence[int]) -> list[tuple[int, int]]:
        """Return some sequences in this order, each with the tokens that it shares with the one before; the
        first: 0.
        """
        ordered = sorted(members, key=lambda member: self.place[member])
        places = self.place[ordered].tolist()
        pairs = itertools.pairwise(places)
        shared = [0, *(int(self.shared[before + 1 : after + 1].min()) for before, after in pairs)]
        return list(zip(ordered, shared, strict=False))


def common_prefix(left: NDArray[np.integer], right: NDArray[np.integer]) -> int:
    """Return how many of their first tokens are the same."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if different.size else length


def _segments(starts: Sequence[int], attached: Sequence[int], count: int) -> tuple[PrefixSegment, ...]:
    """starts: first row of each run of new rows. attached: the row that each of them follows, or -1."""
    if not count:
        return ()
    begins = sorted({*starts, *(row + 1 for row in attached if 0 <= row < count - 1)})
    stops = [*begins[1:], count]
    parents = dict(zip(starts, attached, strict=True))
    number = {stop - 1: index for index, stop in enumerate(stops)}  # by its last row: branches are at ends
    parent = [number[row] if (row := parents.get(start, start - 1)) >= 0 else -1 for start in begins]
    ends = list(stops)
    for index in reversed(range(len(begins))):
        if (above := parent[index]) >= 0:
            ends[above] = max(ends[above], ends[index])
    return tuple(PrefixSegment(*each) for each in zip(begins, stops, parent, ends, strict=True))
