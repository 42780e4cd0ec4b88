"""From rank zero's trajectories of a step to mini-batches: each rank's packed micro-batches of an optimizer step.

All sizes go to every rank, tokens only to the ranks that train on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from random import Random
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from ctpo_megatron.config import PolicyConfig, sequence_multiple
from ctpo_megatron.data import (
    DataError,
    PackedBatch,
    PackingRules,
    PrefixOrder,
    TokenSequence,
    Trajectory,
    micro_batch_count,
    pack,
    split_evenly,
    token_sequences,
    with_turns,
)
from ctpo_megatron.data.tokens import PACKED, common_type, joined
from ctpo_megatron.models import ForwardFlops
from ctpo_megatron.objective import Advantage, Denominators
from ctpo_megatron.policy.attention_plan import attention_calls
from ctpo_megatron.policy.parallel import Layout

Anchor = Literal["proximal", "behaviour", "decoupled"]
_BISECTIONS = 30
"""Of the bound on the cost of a share: to a billionth."""


@dataclass(frozen=True)
class Workload:
    """The work of one optimizer step.

    tokens: of its trajectories, over all ranks. flops: model FLOPs of one forward pass over them. trained_tokens,
    trained_flops: the same for the trajectories that the passes run over. imbalance: largest over mean model FLOPs of
    the data-parallel ranks' shares. distinct_tokens: that the passes of this rank's replica compute. computed_tokens:
    rows of attention there, alignment and padding included. micro_batches: there. packing_s: seconds that this
    rank spent on packing.
    """

    tokens: int
    flops: float
    trained_tokens: int
    trained_flops: float
    imbalance: float
    distinct_tokens: int
    computed_tokens: int
    micro_batches: int
    packing_s: float


@dataclass
class MiniBatch:
    """The data of one optimizer step: this rank's micro-batches, denominators over all ranks, and its size.

    skipped: the sequences of advantage 0 that the update leaves out, with their tokens on rank zero only.
    skipped_micro_batches: this rank's share of them, where a pass without gradient runs over them.
    `apply_correction` changes loss masks and denominators together.
    """

    micro_batches: list[PackedBatch]
    denominators: Denominators
    work: Workload
    skipped: list[TokenSequence]
    skipped_micro_batches: list[PackedBatch] = field(default_factory=list)


def all_micro_batches(mini_batches: Iterable[MiniBatch]) -> list[PackedBatch]:
    """This rank's micro-batches of all optimizer steps, in their order."""
    return [micro for mini in mini_batches for micro in mini.micro_batches]


def in_turn(mini_batches: Sequence[MiniBatch], passes: int, seed: str) -> Iterator[MiniBatch]:
    """Yield the mini-batch of each optimizer step of a batch, every one of them once a pass.

    The first pass keeps the order given. Later ones draw theirs from `seed` and their number, the same on every rank;
    the last of all is again the last mini-batch. Later passes share the old log-probs, which have to be there when they
    begin, and have log-probs of their own.
    """
    yield from mini_batches
    for number in range(2, passes + 1):
        order = [*mini_batches]
        last = [order.pop()] if number == passes else []  # for dumps and curves of the same trajectories
        Random(f"{seed}/{number}").shuffle(order)
        for mini in order + last:
            copies = [[replace(micro) for micro in part] for part in (mini.micro_batches, mini.skipped_micro_batches)]
            work = replace(mini.work, packing_s=0.0)  # nothing is packed again
            yield MiniBatch(copies[0], mini.denominators, work, mini.skipped, copies[1])


def old_log_probs_of(micro: PackedBatch) -> torch.Tensor:
    """Return the stored old log-probs. Raises ValueError if no pass has computed them."""
    if micro.old_log_probs is None:
        raise ValueError("Trainer.compute_old_log_probs() must run before anything that needs old log-probs")
    return micro.old_log_probs


def anchor_of(micro: PackedBatch, anchor: Anchor) -> torch.Tensor:
    """Return the log-probs that ratios are against. Raises ValueError as `old_log_probs_of`."""
    return micro.rollout_log_probs if anchor == "behaviour" else old_log_probs_of(micro)


def checked_sequences(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    vocab_size: int,
    version: int | None = None,
    *,
    by_turn: bool = False,
) -> list[TokenSequence]:
    """Return the sequences of every trajectory; by_turn: with their turns and advantages.

    Raises ValueError as `token_sequences` does and when there is not one advantage for each. Raises DataError for a
    token outside the vocabulary: megatron pads the vocabulary, and would train on the padding rows.
    """
    if len(advantages) != len(trajectories):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories")
    sequences = token_sequences(trajectories, version)
    for sequence in sequences:
        ids = sequence.records["token_ids"]
        beyond = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if beyond.size:
            at = int(beyond[0])
            raise DataError(
                f"trajectory {sequence.name} has token id {ids[at]} at position {at}, but the model's vocabulary has "
                f"{vocab_size} (vocab_size in config.json): were the tokens made with the tokenizer of this model?"
            )
    return with_turns(sequences, trajectories, advantages) if by_turn else sequences


def share_outline(
    read: Callable[[], list[TokenSequence]], advantages: Sequence[Advantage], layout: Layout, *, ordered: bool
) -> tuple[list[TokenSequence], list[float | None], PrefixOrder | None]:
    """Tell every rank what `read` gives on rank zero, without its tokens; collective. Rank zero keeps its tokens.

    Also tells the advantage of each sequence, and, if `ordered`, the order of the sequences by their tokens.
    advantages: of the trajectories, used on rank zero only. Of a tuple, one for each turn, the largest by size counts:
    it is 0 where nothing is learned.
    """
    kept: list[TokenSequence] = []

    def outline() -> tuple[list[TokenSequence], list[float | None], PrefixOrder | None]:
        sequences = read()
        kind = common_type([PACKED, *(sequence.kind for sequence in sequences)])
        kept.extend(replace(sequence, kind=kind) for sequence in sequences)
        known = [advantages[sequence.trajectory] for sequence in kept]
        values = [max(each, key=abs) if isinstance(each, tuple) else each for each in known]
        order = PrefixOrder.of([sequence.records["token_ids"] for sequence in kept]) if ordered else None
        return [replace(sequence, tokens=None) for sequence in kept], values, order

    without_tokens, values, order = layout.on_rank_zero(outline)
    return kept or without_tokens, values, order


def make_mini_batches(
    sequences: Sequence[TokenSequence],
    advantages: Sequence[float | None],
    *,
    size: int,
    rules: PackingRules,
    layout: Layout,
    flops: ForwardFlops,
    whole_attention: bool,
    order: PrefixOrder | None = None,
    skip_zero_advantage: bool = False,
    pack_skipped: bool = False,
) -> list[MiniBatch]:
    """Consecutive runs of `size` trajectories, one per optimizer step, distributed over data-parallel ranks.

    sequences, advantages, order: from `share_outline`. Rank zero sends the tokens to the ranks that train on them.
    Shares are balanced by model FLOPs. A sequence whose advantage is None takes no part: it is in no micro-batch and in
    no denominator. skip_zero_advantage: those whose advantage is 0 are in the denominators but in no micro-batch. A
    rank without any sequence runs one masked sequence. pack_skipped: `skipped_micro_batches` of the first and the last
    step. whole_attention: as in `BuiltModel`; otherwise rows that calls of attention pad count as computed tokens. With
    an order tokens of the same history are computed once, in shares and micro-batches that are runs of it. Raises
    ValueError when an optimizer step has fewer sequences than there are data-parallel ranks. Collective.
    """
    result: list[MiniBatch] = []
    last = sequences[-1].trajectory // size if sequences else 0
    for number, step in groupby(zip(sequences, advantages, strict=True), lambda pair: pair[0].trajectory // size):
        began = time.perf_counter()
        chunk, values = zip(*step, strict=True)
        if len(chunk) < layout.dp_size:
            raise ValueError(f"an optimizer step of {len(chunk)} sequences cannot feed {layout.dp_size} replicas")
        load = _Load(chunk, flops, order, whole_attention=whole_attention)
        # Not `abs(a) > 0`: a NaN has to reach the loss.
        taking_part = {i: value for i, value in enumerate(values) if value is not None}
        trained = [i for i, value in taking_part.items() if not (skip_zero_advantage and value == 0)]
        # Every rank computes all shares: they follow from the sizes alone, so no communication is needed.
        shares = _shares(trained, load, layout)
        micro_batches = _packed(load, shares, taking_part, rules, layout)
        denominators = Denominators.of_counts(chunk[i].loss_tokens for i in taking_part)
        loads = [load.of(share) for share in shares]
        work = Workload(
            tokens=sum(map(len, chunk)),
            flops=sum(load.alone),
            trained_tokens=sum(len(chunk[i]) for i in trained),
            trained_flops=sum(loads),
            imbalance=max(loads) * layout.dp_size / sum(loads) if trained else 1.0,
            distinct_tokens=sum(micro.distinct_tokens for micro in micro_batches),
            computed_tokens=sum(_attention_rows(micro, whole_attention) for micro in micro_batches),
            micro_batches=len(micro_batches),
            packing_s=time.perf_counter() - began,
        )
        skipped = sorted(taking_part.keys() - set(trained))
        result.append(MiniBatch(micro_batches, denominators, work, [chunk[i] for i in skipped]))
        if skipped and pack_skipped and number in (0, last):
            passed = _packed(load, _shares(skipped, load, layout), taking_part, rules, layout)
            result[-1].skipped_micro_batches = passed
    return result


class _Load:
    """Model FLOPs of a forward pass over sequences of an optimizer step. alone: of each by itself.

    order: of the step, with which tokens of the same history count once; None: every token counts. whole_attention:
    they do in attention, which computes whole sequences.
    """

    def __init__(
        self, chunk: Sequence[TokenSequence], flops: ForwardFlops, order: PrefixOrder | None, *, whole_attention: bool
    ) -> None:
        self.chunk, self.order, self._flops, self._whole_attention = chunk, order, flops, whole_attention
        self.alone = [flops(each.length, each.sampled_tokens) for each in chunk]

    def of(self, members: Sequence[int]) -> float:
        """Of some sequences, by number in the step, in one pass."""
        return sum(flops for _, flops in self.walk(members))

    def walk(self, members: Sequence[int]) -> list[tuple[int, float]]:
        """Return the members, in the order if there is one, each with the FLOPs that it adds to those before it."""
        if self.order is None:
            return [(i, self.alone[i]) for i in members]
        number = {self.chunk[i].place: i for i in members}
        return [(number[place], self._added(number[place], shared)) for place, shared in self.order.walk([*number])]

    def _added(self, index: int, shared: int) -> float:
        if not shared:
            return self.alone[index]
        sampled = self.chunk[index].sampled_tokens
        saved = self._flops(shared, max(0, sampled - (self.chunk[index].length - shared)))
        again = self._flops.attention(shared) if self._whole_attention else 0
        return self.alone[index] - saved + again


def _shares(members: Sequence[int], load: _Load, layout: Layout) -> list[list[int]]:
    """The members that each data-parallel rank takes: runs of the order where the costliest share is smaller then."""
    parts = split_evenly([load.chunk[i] for i in members], layout.dp_size, [load.alone[i] for i in members])
    even = [[members[i] for i in part] for part in parts]
    if load.order is None or layout.dp_size == 1 or not members:
        return even
    runs = _runs(load, members, layout.dp_size)
    return min((even, runs), key=lambda shares: max(map(load.of, shares)))


def _runs(load: _Load, members: Sequence[int], parts: int) -> list[list[int]]:
    """Members in runs of the order, with the smallest bound on the cost of a run that `parts` runs allow."""
    walk = load.walk(members)

    def cut(bound: float) -> list[list[int]]:
        runs, cost = [[walk[0][0]]], load.alone[walk[0][0]]
        for index, added in walk[1:]:
            cost += added
            if cost > bound:
                runs.append([])
                cost = load.alone[index]
            runs[-1].append(index)
        return runs

    low, high = max(load.alone[index] for index, _ in walk), sum(load.alone[index] for index, _ in walk)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= parts else (middle, high)
    runs = cut(high)
    while len(runs) < parts and any(len(run) > 1 for run in runs):  # no rank is without work
        longest = max(range(len(runs)), key=lambda number: len(runs[number]))
        run = runs[longest]
        runs[longest : longest + 1] = [run[: len(run) // 2], run[len(run) // 2 :]]
    return runs + [[] for _ in range(parts - len(runs))]


def _packed(
    load: _Load,
    shares: Sequence[Sequence[int]],
    advantages: Mapping[int, float],
    rules: PackingRules,
    layout: Layout,
) -> list[PackedBatch]:
    """This rank's share in micro-batches; collective."""
    chunk, order = load.chunk, load.order
    own = share_tokens(chunk, shares, layout)
    at_least = 1
    if layout.ep_size > 1:  # to exchange experts' tokens, replicas run the same passes: as many as the one with most
        at_least = max(1, *(micro_batch_count([chunk[i] for i in share], rules, order) for share in shares))
    kind = common_type([PACKED, *(sequence.kind for sequence in chunk)])
    values = [advantages[i] for i in shares[layout.dp_rank]]
    packed = pack(own, values, rules, at_least=at_least, kind=kind, order=order)
    return [micro.to(layout.device) for micro in packed]


def _attention_rows(micro: PackedBatch, whole_attention: bool) -> int:
    """Rows of the calls of attention, padding included; of a forest without what its calls pad and repeat."""
    if micro.forest:
        return micro.forest.rows
    if whole_attention:
        return int(micro.on_host.cu_seqlens[-1])
    calls = attention_calls(micro.on_host.cu_seqlens.diff().tolist())
    return sum(len(call.members) * call.length for call in calls)


def packing_rules(config: PolicyConfig) -> PackingRules:
    """Return what the layout requires of micro-batches: equal pieces for context parallelism, equal shares for sequence
    parallelism, whole rounds for virtual pipeline stages."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    return PackingRules(
        max_tokens=config.chosen.micro_batch_tokens * cp,
        sequence_multiple=sequence_multiple(config),
        batch_multiple=cp * tp if config.sequence_parallel else 1,
        count_multiple=config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1,
    )


def share_tokens(
    sequences: Sequence[TokenSequence], shares: Sequence[Sequence[int]], layout: Layout
) -> list[TokenSequence]:
    """This rank's share with its tokens; collective.

    sequences: from `share_outline`. shares: the indices that each data-parallel rank trains on. A token is sent as a
    record of its type, to the ranks of the replica that trains on it.
    """
    own = [sequences[index] for index in shares[layout.dp_rank]]
    if layout.world_size == 1:
        return own
    if not layout.is_rank_zero:
        return _receive(own)
    sending: list[dist.Work | None] = []  # None: to a rank outside of the job's group, which all are in
    for replica, share in enumerate(shares):
        ranks = [rank for rank, of in enumerate(layout.dp_ranks) if of == replica and rank != 0]
        if share and ranks:
            tokens = share_of([sequences[index] for index in share])
            sending += [dist.isend(tokens, dst=rank) for rank in ranks]
    # All sends are queued before the first wait, so that ranks receive in parallel.
    for work in filter(None, sending):
        work.wait()
    return own


def share_of(sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return the tokens of these sequences one after another, as bytes."""
    return torch.from_numpy(joined([each.records for each in sequences], sequences[0].kind).view(np.uint8))


def _receive(own: Sequence[TokenSequence]) -> list[TokenSequence]:
    if not own:
        return []
    tokens = np.zeros(sum(len(sequence) for sequence in own), own[0].kind)
    dist.recv(torch.from_numpy(tokens.view(np.uint8)), src=0)
    ends = np.cumsum([len(sequence) for sequence in own])
    return [
        replace(sequence, tokens=tokens[end - len(sequence) : end]) for sequence, end in zip(own, ends, strict=True)
    ]
