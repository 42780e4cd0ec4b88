"""How sequences of a packed batch become calls of dense causal attention: their shapes, and the rows of each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from ctpo_megatron.policy.context import ContextSplit
from ctpo_megatron.policy.nodes import take_rows

SHORTEST_OF_CLASS = 0.95
"""A sequence joins a class of padded attention rows if it has at least this share of the class's length."""
STEP = 64
"""Tokens between the lengths of bounded calls, as long as that is more than the share above allows."""


@dataclass(frozen=True)
class AttentionRules:
    """How the calls are made; `device.attention_rules` chooses.

    bounded: of few different shapes in a whole run (`call_lengths`), at the price of some padding, because cuDNN may
    take the calls. repeat_keys: grouped keys and values are repeated for every head.
    """

    bounded: bool = False
    repeat_keys: bool = False


EXACT = AttentionRules()
"""Shapes that fit, and grouped keys as they are."""


class AttentionCall(NamedTuple):
    """One call of attention: its sequences, by their number, and the length that they are padded to."""

    members: tuple[int, ...]
    length: int


def attention_calls(lengths: Sequence[int], *, bounded: bool) -> list[AttentionCall]:
    """The calls for sequences of these lengths, the longest first; those without tokens are in none.

    From the longest on, lengths within `SHORTEST_OF_CLASS` of it share a call and are padded to it. Bounded calls are
    padded to the next of `call_lengths`, and have 1, 2, 4, 8 ... sequences, so that no row is padding.
    """
    classes: dict[int, list[int]] = {}
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not (length := lengths[index]):
            break
        if bounded:
            longest = _call_length(length)
        elif not longest or length < SHORTEST_OF_CLASS * longest:
            longest = length
        classes.setdefault(longest, []).append(index)
    calls = []
    for length, members in classes.items():
        members.sort()
        calls += [AttentionCall(part, length) for part in (_in_powers_of_two(members) if bounded else [tuple(members)])]
    return calls


@cache
def call_lengths(most: int) -> tuple[int, ...]:
    """Lengths of bounded calls, ascending, up to the first that holds `most` tokens.

    Multiples of `STEP`, each at most 1 / `SHORTEST_OF_CLASS` of the one before where that is more than a step further.
    """
    lengths = [STEP]
    while lengths[-1] < most:
        lengths.append(max(lengths[-1] + STEP, int(lengths[-1] / SHORTEST_OF_CLASS) // STEP * STEP))
    return tuple(lengths)


def _call_length(length: int) -> int:
    grid = call_lengths(1 << length.bit_length())  # few different arguments: the result is kept for each
    return grid[bisect_left(grid, length)]


def _in_powers_of_two(members: Sequence[int]) -> Iterator[tuple[int, ...]]:
    start = 0
    while rest := len(members) - start:
        size = 1 << (rest.bit_length() - 1)
        yield tuple(members[start : start + size])
        start += size


def attention_shapes(cu_seqlens: torch.Tensor, rules: AttentionRules | None) -> list[tuple[int, int]]:
    """(sequences, length) of each call of attention over sequences with these boundaries.

    rules: None for layers that take all sequences in one call, as Transformer Engine's do.
    """
    if rules is None:
        return [(1, int(cu_seqlens[-1]))]
    calls = attention_calls(cu_seqlens.diff().tolist(), bounded=rules.bounded)
    return [(len(call.members), call.length) for call in calls]


class AttentionPlan:
    """Sequences of a packed batch sorted into classes of similar length (see `attention_calls`), on the host.

    Each class is one dense causal attention call on rows padded to one length. Padding follows the real tokens,
    where causality hides it from them: the result is exact, and few of the rows are padding. Under context parallelism
    keys and values come from all ranks, queries from this one.

    queries: `[M]`, the query in each row of all classes, class after class; padding repeats the first query of its
    sequence. tokens: the same for keys and values (the same tensor if one rank holds all tokens). back: `[n]`, the row
    of each query. classes: their sizes and masks. split: which tokens the queries are. rules: how attention is called.
    """

    def __init__(self, split: ContextSplit, rules: AttentionRules = EXACT) -> None:
        self.split, self.rules = split, rules
        planned, device, ranks = split.on_host, split.cu_seqlens.device, split.size
        cu_seqlens = planned.cu_seqlens * ranks
        calls = attention_calls(cu_seqlens.diff().tolist(), bounded=rules.bounded)
        tokens = queries = [_padded_rows(cu_seqlens, call.members, call.length) for call in calls]
        if not split.whole:
            shares = [(call.members, -(-call.length // ranks)) for call in calls]
            queries = [_padded_rows(planned.cu_seqlens, *share) for share in shares]
        asking = torch.cat([index.flatten() for index, _ in queries])
        found = torch.cat([real.flatten() for _, real in queries]).nonzero().squeeze(1)
        back = torch.empty_like(found)
        back[asking[found]] = found
        self.queries, self.back = (index.to(device, non_blocking=True) for index in (asking, back))
        self.tokens = self.queries
        if not split.whole:
            self.tokens = torch.cat([index.flatten() for index, _ in tokens]).to(device, non_blocking=True)
        self.classes = [
            LengthClass(q.shape, k.shape, self._visible(q, k)) for (q, _), (k, _) in zip(queries, tokens, strict=True)
        ]

    def _visible(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """Computed on the device: the mask is larger than its inputs."""
        if self.split.whole:
            return None
        device = self.split.rows.device
        position = (self.split.on_host.rows[queries] - tokens[:, :1]).to(device, non_blocking=True)
        return (torch.arange(tokens.shape[1], device=device) <= position[..., None])[:, None]

    def rows_of(self, t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` (`queries` or `tokens`) of t. If one rank holds all tokens, padding gets no gradient."""
        return take_rows(t, at, self.back) if self.split.whole else t.index_select(0, at)

    def masks(self, _: torch.dtype) -> list[torch.Tensor | None]:
        """The mask of each call; None: plain causal attention."""
        return [part.visible for part in self.classes]

    @classmethod
    def of(cls, packed: PackedSeqParams) -> Any:
        """The plan of this micro-batch, computed once and stored on the record that all layers share: one of these, or
        a `ForestPlan`."""
        found = getattr(packed, "attention_plan", None)
        if found is None:
            found = cls(packed.split, getattr(packed, "rules", EXACT))
            packed.attention_plan = found
        return found


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
