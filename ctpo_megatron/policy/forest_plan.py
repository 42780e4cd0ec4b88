"""How the rows of a forest become calls of dense attention: each row asks once, and sees the rows of its path."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ctpo_megatron.data import Forest, PackedBatch, PrefixSegment
from ctpo_megatron.policy.attention_plan import EXACT, STEP, AttentionRules, LengthClass
from ctpo_megatron.policy.nodes import gather_rows, take_rows

RowNumbers = NDArray[np.int64]

CALL_US, PAIR_US, KEY_US = 60.0, 0.012, 0.25
"""Microseconds of a block, of a pair of query and key, and of a gathered key: docs/policy.md says where from."""
_FINE_STEP = 16


class AttentionBlock(NamedTuple):
    """rows: ascending, that ask together. path: the rows before them that all of them see. chain: each row sees all of
    `rows` before it."""

    rows: RowNumbers
    path: RowNumbers
    chain: bool


class ForestPlan:
    """The rows of a forest sorted into classes of similar blocks; each class is one call.

    queries, tokens, back, classes, rules: as in `AttentionPlan`, of rows in place of tokens; a row is in `tokens` once
    for each block that sees it. boundaries: carries positions and rotations of the rows to rotary layers.
    """

    def __init__(self, forest: Forest, device: torch.device, rules: AttentionRules = EXACT) -> None:
        # On CUDA masks are for the memory-efficient back end, which takes as many heads of keys as of queries.
        self.rules = replace(rules, repeat_keys=rules.repeat_keys or device.type == "cuda")
        self.first = torch.from_numpy(forest.first).to(device, non_blocking=True)
        self.boundaries = torch.tensor([0, forest.rows], dtype=torch.int32).to(device, non_blocking=True)
        step = STEP if rules.bounded else _FINE_STEP
        classes: dict[tuple[int, int, bool], list[AttentionBlock]] = {}
        for block in blocks(forest):
            queries, path = _padded(len(block.rows), step), len(block.path)
            keys = path if block.chain else _padded(path + len(block.rows), step)
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
        self.queries, self.back = (torch.from_numpy(each).to(device, non_blocking=True) for each in (queries_at, back))
        self.tokens = self.queries
        if not np.array_equal(queries_at, tokens_at):
            self.tokens = torch.from_numpy(tokens_at).to(device, non_blocking=True)
        self._masks: list[torch.Tensor | None] | None = None

    @classmethod
    def of(cls, batch: PackedBatch, rules: AttentionRules) -> ForestPlan:
        """The plan of a batch that has a forest, made once for all passes, for one pass, whose masks end with it."""
        assert batch.forest is not None
        plans = batch.forest.derived
        if "plan" not in plans:
            plans["plan"] = cls(batch.forest, batch.token_ids.device, rules)
        plan: ForestPlan = copy.copy(plans["plan"])
        return plan

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]` of the tokens -> `[n]` of the rows."""
        return values[self.first]

    def rows_of(self, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` (`queries` or `tokens`) of t; gradients of a row that is there several times add up in float32."""
        return take_rows(t, at, self.back) if at is self.queries else gather_rows(t, at)

    def masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """What is added to the scores of each call, None for plain causal attention; made once for all layers.

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
        self.row, self.first = (
            torch.from_numpy(index).to(device, non_blocking=True) for index in (forest.row, forest.first)
        )

    @classmethod
    def of(cls, batch: PackedBatch) -> WholeSequences:
        """Return the sequences of a batch that has a forest, made once for all passes."""
        assert batch.forest is not None
        plans = batch.forest.derived
        if "whole" not in plans:
            plans["whole"] = cls(batch.forest, batch.token_ids.device)
        plan: WholeSequences = plans["whole"]
        return plan

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


def _padded(length: int, step: int) -> int:
    return -(-length // step) * step


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
    hidden = ~visible.to(device, non_blocking=True)
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
