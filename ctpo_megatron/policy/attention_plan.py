"""How sequences and forests of a packed batch become calls of dense causal attention: shapes, and rows of each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ctpo_megatron.base.host_copies import all_to_device, to_device
from ctpo_megatron.data import Forest, PackedBatch, PrefixSegment
from ctpo_megatron.policy.context import ContextSplit, gather_rows, take_rows

SHORTEST_OF_CLASS = 0.95
"""A sequence joins a class of padded attention rows if it has at least this share of the class's length."""


class AttentionCall(NamedTuple):
    """One call of attention: its sequences, by their number, and the length that they are padded to."""

    members: tuple[int, ...]
    length: int


def attention_calls(lengths: Sequence[int]) -> list[AttentionCall]:
    """Return the calls for sequences of these lengths, the longest first; those without tokens are in none.

    From the longest on, lengths within `SHORTEST_OF_CLASS` of it share a call and are padded to it.
    """
    classes: dict[int, list[int]] = {}
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not (length := lengths[index]):
            break
        if not longest or length < SHORTEST_OF_CLASS * longest:
            longest = length
        classes.setdefault(longest, []).append(index)
    return [AttentionCall(tuple(sorted(members)), length) for length, members in classes.items()]


class AttentionPlan:
    """Sequences of a packed batch sorted into classes of similar length (see `attention_calls`), on the host.

    Each class is one dense causal attention call on rows padded to one length. Padding follows the real tokens,
    where causality hides it from them: the result is exact, and few of the rows are padding. Under context parallelism
    keys and values come from all ranks, queries from this one.

    queries: `[M]`, the query in each row of all classes, class after class; padding repeats the first query of its
    sequence. tokens: the same for keys and values (the same tensor if one rank holds all tokens). back: `[n]`, the row
    of each query. classes: their sizes and masks. split: which tokens the queries are.
    """

    def __init__(self, split: ContextSplit) -> None:
        self.split = split
        planned, device, ranks = split.on_host, split.cu_seqlens.device, split.size
        cu_seqlens = planned.cu_seqlens * ranks
        calls = attention_calls(cu_seqlens.diff().tolist())
        tokens = queries = [_padded_rows(cu_seqlens, call.members, call.length) for call in calls]
        if not split.whole:
            shares = [(call.members, -(-call.length // ranks)) for call in calls]
            queries = [_padded_rows(planned.cu_seqlens, *share) for share in shares]
        asking = torch.cat([index.flatten() for index, _ in queries])
        found = torch.cat([real.flatten() for _, real in queries]).nonzero().squeeze(1)
        back = torch.empty_like(found)
        back[asking[found]] = found
        others = [] if split.whole else [torch.cat([index.flatten() for index, _ in tokens])]
        self.queries, self.back, *found_tokens = all_to_device([asking, back, *others], device)
        self.tokens = found_tokens[0] if found_tokens else self.queries
        self.classes = [
            LengthClass(q.shape, k.shape, self._visible(q, k)) for (q, _), (k, _) in zip(queries, tokens, strict=True)
        ]

    def _visible(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Computed on the device: the mask is larger than its inputs."""
        if self.split.whole:
            return None
        device = self.split.rows.device
        position = to_device(self.split.on_host.rows[queries] - tokens[:, :1], device)
        return (torch.arange(tokens.shape[1], device=device) <= position[..., None])[:, None]

    def rows_of(self, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` (`queries` or `tokens`) of t. If one rank holds all tokens, padding gets no gradient."""
        return take_rows(t, at, self.back) if self.split.whole else t.index_select(0, at)

    def masks(self, _: torch.dtype) -> list[torch.Tensor | None]:
        """Return the mask of each call; None: plain causal attention."""
        return [part.visible for part in self.classes]


@dataclass(frozen=True)
class LengthClass:
    """One attention call. queries, tokens: (rows, length) of the queries, and of the keys and values.

    visible: bool `[rows, 1, q, k]`, which keys a query sees; None where queries and keys are the same tokens (plain
    causal attention).
    """

    queries: torch.Size
    tokens: torch.Size
    visible: torch.Tensor | None


def _padded_rows(cu_seqlens: torch.Tensor, members: Sequence[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Index `[rows, length]` of the tokens of some sequences, and which are real; padding repeats the first."""
    at = torch.tensor(members)
    starts, lengths = cu_seqlens[:-1].long()[at], cu_seqlens.diff().long()[at]
    offsets = torch.arange(length, device=lengths.device)
    real = offsets < lengths[:, None]
    return starts[:, None] + offsets.where(real, 0), real


RowNumbers = NDArray[np.int64]

CALL_US, PAIR_US, KEY_US = 60.0, 0.012, 0.25
"""Microseconds of a block, of a pair of query and key, and of a gathered key, on a CPU with the quickstart's heads."""
_STEP = 16
"""Rows that the sizes of blocks are rounded up to, so that similar ones share a call."""


class AttentionBlock(NamedTuple):
    """rows: ascending, that ask together. path: the rows before them that all of them see. chain: each row sees all of
    `rows` before it."""

    rows: RowNumbers
    path: RowNumbers
    chain: bool


class ForestPlan:
    """The rows of a forest sorted into classes of similar blocks; each class is one call.

    queries, tokens, back, classes: as in `AttentionPlan`, of rows in place of tokens; a row is in `tokens` once for
    each block that sees it. boundaries: carries positions and rotations of the rows to rotary layers.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        classes: dict[tuple[int, int, bool], list[AttentionBlock]] = {}
        for block in blocks(forest):
            queries, path = _padded(len(block.rows)), len(block.path)
            keys = path if block.chain else _padded(path + len(block.rows))
            classes.setdefault((queries, keys, block.chain), []).append(block)
        asking, seen, self.classes = list[RowNumbers](), list[RowNumbers](), list[LengthClass]()
        back, ends, start = np.zeros(forest.rows, np.int64), _ends(forest), 0
        for (*_, chain), members in classes.items():
            queries = max(len(block.rows) for block in members)
            keys = max(len(block.path) + len(block.rows) for block in members)
            for number, block in enumerate(members):
                # Padding repeats the first row: nothing that is kept sees it, and what it sees is not kept.
                asking.append(_filled(block.rows, queries))
                seen.append(_filled(np.concatenate([block.path, block.rows]), keys))
                back[block.rows] = start + number * queries + np.arange(len(block.rows))
            start += len(members) * queries
            visible = _visible_in_chains(queries, keys) if chain else _visible_in_trees(members, ends, queries, keys)
            plain = chain and queries == keys
            sizes = torch.Size((len(members), queries)), torch.Size((len(members), keys))
            # In host memory: the plans of all micro-batches of a step exist at the same time.
            self.classes.append(LengthClass(*sizes, None if plain else torch.from_numpy(visible)[:, None]))
        queries_at, tokens_at = np.concatenate(asking), np.concatenate(seen)
        others = [] if np.array_equal(queries_at, tokens_at) else [tokens_at]
        given = [torch.from_numpy(each) for each in (forest.first, queries_at, back, *others)]
        boundaries = torch.tensor([0, forest.rows], dtype=torch.int32)
        self.boundaries, self.first, self.queries, self.back, *found = all_to_device([boundaries, *given], device)
        self.tokens = found[0] if found else self.queries
        self._masks: list[torch.Tensor | None] | None = None

    @classmethod
    def of(cls, batch: PackedBatch) -> ForestPlan:
        """Return the plan of a batch that has a forest, made once for all passes, for one pass, whose masks end with
        it.
        """
        forest = batch.forest
        assert forest is not None
        return copy.copy(forest.derive(cls, lambda: cls(forest, batch.token_ids.device)))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]` of the tokens -> `[n]` of the rows."""
        return values[self.first]

    def rows_of(self, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` (`queries` or `tokens`) of t; gradients of a row that is there several times add up in float32."""
        return take_rows(t, at, self.back) if at is self.queries else gather_rows(t, at)

    def masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return what is added to the scores of each call, None for plain causal attention; made once for all layers.

        torch makes a mask of numbers from one of booleans in every call, and keeps it for the backward pass.
        """
        if self._masks is None or next((m.dtype for m in self._masks if m is not None), dtype) != dtype:
            self._masks = [_added(part.visible, dtype, self.back.device) for part in self.classes]
        return self._masks


class WholeSequences:
    """The sequences of a forest, for attention that takes no rows: Transformer Engine's.

    row: int64 `[N]`, the row of each token. first: int64 `[n]`, a token of each row: its output is the row's, and the
    gradient of its query. An alignment row has the first token of a sequence, whose query has no gradient: it sees
    itself alone.
    """

    def __init__(self, forest: Forest, device: torch.device) -> None:
        self.row, self.first = all_to_device([torch.from_numpy(index) for index in (forest.row, forest.first)], device)

    @classmethod
    def of(cls, batch: PackedBatch) -> WholeSequences:
        """Return the sequences of a batch that has a forest, made once for all passes."""
        forest = batch.forest
        assert forest is not None
        return forest.derive(cls, lambda: cls(forest, batch.token_ids.device))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Take `[N]` of the tokens to `[n]` of the rows."""
        return values[self.first]


def blocks(forest: Forest) -> list[AttentionBlock]:
    """Segments joined to blocks where one call costs less than two, from the leaves on."""
    segments = forest.segments
    depth = list[int]()
    for segment in segments:
        above = segment.parent
        depth.append(0 if above < 0 else depth[above] + segments[above].stop - segments[above].start)
    sizes = [segment.stop - segment.start for segment in segments]
    members: list[list[int]] = [[index] for index in range(len(segments))]
    joined = [False] * len(segments)
    for index in reversed(range(len(segments))):
        above = segments[index].parent
        if above >= 0 and _cost(sizes[above] + sizes[index], depth[above]) <= (
            _cost(sizes[above], depth[above]) + _cost(sizes[index], depth[index])
        ):
            members[above] += members[index]
            sizes[above] += sizes[index]
            joined[index] = True
    return [
        AttentionBlock(
            _rows([segments[i] for i in sorted(members[index])]), _path(segments, index), len(members[index]) == 1
        )
        for index in range(len(segments))
        if not joined[index]
    ]


def _cost(queries: int, depth: int) -> float:
    keys = queries + depth
    return CALL_US + PAIR_US * queries * keys + KEY_US * keys


def _rows(segments: list[PrefixSegment]) -> RowNumbers:
    return np.concatenate([np.arange(each.start, each.stop) for each in segments] or [np.zeros(0, np.int64)])


def _path(segments: tuple[PrefixSegment, ...], index: int) -> RowNumbers:
    above = list[PrefixSegment]()
    while (index := segments[index].parent) >= 0:
        above.append(segments[index])
    return _rows(above[::-1])


def _ends(forest: Forest) -> RowNumbers:
    """`[n]`, behind the rows below each row."""
    lengths = [each.stop - each.start for each in forest.segments]
    return np.repeat(np.array([each.end for each in forest.segments]), lengths)


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP


def _filled(rows: RowNumbers, length: int) -> RowNumbers:
    found = np.full(length, rows[0])
    found[: len(rows)] = rows
    return found


def _visible_in_chains(queries: int, keys: int) -> NDArray[np.bool_]:
    """`[1, q, k]`, causal to the lower right: blocks of a class have paths of one length."""
    return (np.arange(keys)[None] <= np.arange(queries)[:, None] + (keys - queries))[None]


def _visible_in_trees(members: list[AttentionBlock], ends: RowNumbers, queries: int, keys: int) -> NDArray[np.bool_]:
    """`[blocks, q, k]`."""
    visible = np.zeros((len(members), queries, keys), np.bool_)
    for mask, block in zip(visible, members, strict=True):
        count, before = len(block.rows), len(block.path)
        mask[:, :before] = True
        asking, seen = block.rows[:, None], block.rows[None]
        mask[:count, before : before + count] = (seen <= asking) & (asking < ends[seen])
        mask[count:, 0] = True  # padding sees something, or its softmax has no sum
    return visible


def _added(visible: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    if visible is None:
        return None
    hidden = ~to_device(visible, device)
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
