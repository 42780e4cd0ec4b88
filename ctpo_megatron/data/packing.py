"""Packs the sequences of a step into micro-batches of flat tokens; what one forward pass of the policy sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ctpo_megatron.data.sequences import TokenArrays, TokenSequence


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch: sequences laid end to end.

    token_ids, position_ids: [N] int64; cu_seqlens: [B+1] int32, cu_seqlens[0] = 0, cu_seqlens[-1] = N.
    response_mask, loss_mask, current: [N] bool, aligned with the token that is predicted (the first token of a sequence
    is 0); current: see `TokenArrays`.
    rollout_log_probs, advantages, log_probs, old_log_probs: [N] fp32 (nats). log_probs: of the latest pass over it;
    old_log_probs: of the weights that the batch began with; both are filled by the policy, as is entropy_sum (nats,
    fp64 scalar, with old_log_probs).
    correction_weights: [N] fp32, detached factors of the token losses; None: 1 (filled by the policy's correction).
    sequences, lengths: place in the step and tokens of each sequence. Alignment may put masked tokens behind them,
    inside its boundaries, and one masked sequence, not listed, at the end of the micro-batch.
    on_policy: the weights are still those that the batch began with, so that the old log-probs are those of the
    training pass itself. packed: the same in host memory, as `pack` made it; None where this is it.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    current: torch.Tensor
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    log_probs: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    entropy_sum: torch.Tensor | None = None
    correction_weights: torch.Tensor | None = None
    on_policy: bool = False
    packed: PackedBatch | None = None

    @property
    def on_host(self) -> PackedBatch:
        """As packed, in host memory: what is planned from it is not read back from the device.

        Neither `old_log_probs` nor what the correction does, which leaves tokens out of `loss_mask`.
        """
        return self.packed or self

    @property
    def num_tokens(self) -> int:
        """N, alignment included."""
        return int(self.token_ids.numel())

    @property
    def max_seqlen(self) -> int:
        return int(self.on_host.cu_seqlens.diff().max())

    def places(self) -> Iterator[tuple[int, slice]]:
        """Place of each sequence in the step, and where its tokens are; alignment is left out."""
        starts = self.on_host.cu_seqlens.tolist()
        for place, start, length in zip(self.sequences, starts, self.lengths, strict=False):
            yield place, slice(start, start + length)

    def to(self, device: torch.device) -> PackedBatch:
        """The same micro-batch with its tensors on `device`; the host does not wait for the copies."""
        tensors = {
            name: value.to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), torch.Tensor)
        }
        return replace(self, **tensors, packed=self.on_host)  # type: ignore[arg-type] # only names of tensors


@dataclass(frozen=True)
class PackingRules:
    """What a parallel layout asks of the micro-batches of one rank.

    max_tokens: capacity of a micro-batch. sequence_multiple, batch_multiple: the tokens of every sequence and of every
    micro-batch are filled up to a multiple. count_multiple: so is the number of micro-batches.
    """

    max_tokens: int
    sequence_multiple: int = 1
    batch_multiple: int = 1
    count_multiple: int = 1

    def padded(self, tokens: int) -> int:
        """Tokens that a sequence of `tokens` takes."""
        return math.ceil(tokens / self.sequence_multiple) * self.sequence_multiple


def split_evenly(
    sequences: Sequence[TokenSequence], parts: int, costs: Sequence[float] | None = None
) -> list[list[int]]:
    """Indices of the sequences for each of `parts` data-parallel ranks: the costliest first, to the least loaded.

    costs: positive, one per sequence; None: token counts. No part is empty if there are as many sequences as
    parts. The largest load is at most 4/3 - 1/(3 parts) times the best possible (Graham 1969).
    """
    costs = [len(t) for t in sequences] if costs is None else costs
    loads = [0.0] * parts
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(sequences)), key=lambda i: (-costs[i], i)):
        target = loads.index(min(loads))
        result[target].append(index)
        loads[target] += costs[index]
    return [sorted(part) for part in result]


def pack(
    sequences: Sequence[TokenSequence],
    advantages: Sequence[float] | None,
    rules: PackingRules,
    *,
    at_least: int = 0,
) -> list[PackedBatch]:
    """Pack into as few micro-batches as first-fit-decreasing finds, or `at_least` so many.

    advantages: one per sequence, broadcast to its tokens (None: 0). More micro-batches than sequences leave some of
    one masked sequence: nothing is learned from it, but ranks that wait for each other run the same number of passes.
    The result depends only on the arguments. Raises ValueError for a sequence longer than `rules.max_tokens`.
    """
    return [
        _concatenate(
            [sequences[i] for i in members],
            [0.0] * len(members) if advantages is None else [advantages[i] for i in members],
            rules,
        )
        for members in _bins(sequences, rules, at_least)
    ]


def micro_batch_count(sequences: Sequence[TokenSequence], rules: PackingRules) -> int:
    """How many micro-batches `pack` makes of them."""
    return len(_bins(sequences, rules, 0))


def _bins(sequences: Sequence[TokenSequence], rules: PackingRules, at_least: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch."""
    for sequence in sequences:
        if rules.padded(len(sequence)) > rules.max_tokens:
            raise ValueError(
                f"trajectory {sequence.name} has {len(sequence)} tokens, but a micro-batch holds "
                f"{rules.max_tokens} (policy.micro_batch_tokens x policy.context_parallel_size); raise it, or lower "
                "rollout.max_response_tokens"
            )
    bins: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        length = rules.padded(len(sequences[index]))
        place = next((b for b, tokens in enumerate(used) if tokens + length <= rules.max_tokens), None)
        if place is None:
            bins.append([index])
            used.append(length)
        else:
            bins[place].append(index)
            used[place] += length
    wanted = math.ceil(max(len(bins), at_least) / rules.count_multiple) * rules.count_multiple
    return _divided(sequences, bins, wanted)


def _divided(sequences: Sequence[TokenSequence], bins: list[list[int]], count: int) -> list[list[int]]:
    """The same work in `count` or more micro-batches: the largest are halved; what is still missing is empty."""
    while len(bins) < count:
        divisible = [b for b, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            return bins + [[]] * (count - len(bins))
        largest = max(divisible, key=lambda b: (sum(len(sequences[i]) for i in bins[b]), -b))
        members = bins[largest]
        halves = split_evenly([sequences[i] for i in members], 2)
        bins[largest : largest + 1] = [[members[i] for i in half] for half in halves]
    return bins


def _concatenate(chosen: list[TokenSequence], advantages: list[float], rules: PackingRules) -> PackedBatch:
    lengths = [len(t) for t in chosen]
    sizes = [rules.padded(length) for length in lengths]
    multiple = math.lcm(rules.sequence_multiple, rules.batch_multiple)
    filler = -sum(sizes) % multiple if chosen else multiple
    if filler:
        sizes.append(filler)
    starts = np.cumsum([0, *sizes]).tolist()

    tokens = [_tokens(sequence) for sequence in chosen]

    def flat(column: str, dtype: torch.dtype) -> torch.Tensor:
        values = torch.zeros(sum(sizes), dtype=dtype)
        for start, arrays in zip(starts, tokens, strict=False):
            array = getattr(arrays, column)
            values[start : start + len(array)] = torch.from_numpy(array)
        return values

    in_order = torch.tensor(sizes)
    cu_seqlens = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    cu_seqlens[1:] = in_order.cumsum(0)
    return PackedBatch(
        token_ids=flat("token_ids", torch.int64),
        position_ids=torch.arange(int(in_order.sum())) - cu_seqlens[:-1].long().repeat_interleave(in_order),
        cu_seqlens=cu_seqlens,
        response_mask=flat("response_mask", torch.bool),
        loss_mask=flat("loss_mask", torch.bool),
        current=flat("current", torch.bool),
        rollout_log_probs=flat("rollout_log_probs", torch.float32),
        advantages=torch.tensor([*advantages, *[0.0] * bool(filler)]).repeat_interleave(in_order),
        sequences=tuple(sequence.place for sequence in chosen),
        lengths=tuple(lengths),
    )


def _tokens(sequence: TokenSequence) -> TokenArrays:
    if sequence.tokens is None:
        raise ValueError(f"trajectory {sequence.name} belongs to another data-parallel rank")
    return sequence.tokens
