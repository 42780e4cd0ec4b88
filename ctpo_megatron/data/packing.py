"""Packs the sequences of a step into micro-batches of flat tokens, the input of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ctpo_megatron.base.host_copies import all_to_device
from ctpo_megatron.data.forest import Forest, PrefixOrder
from ctpo_megatron.data.tokens import BY_TURN, PACKED, ROUTER_CHOICES, common_type, further, joined
from ctpo_megatron.data.trajectory import Trajectory

LEAST_SHARED = 0.97
"""Rows over tokens above which a micro-batch is computed token by token."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One sequence of a training step: a trajectory, or a part of one that has several.

    place: its index among the sequences of the step. trajectory: index of its trajectory in the step. name: prompt and
    sample, for messages. length, sampled_tokens, loss_tokens: number of all tokens, of sampled tokens and of loss
    tokens. tokens: `[length]`, a record of `PACKED` each, with further columns; None on ranks that do not train on it.
    kind: their type, on every rank.
    """

    place: int
    trajectory: int
    name: str
    length: int
    sampled_tokens: int
    loss_tokens: int
    tokens: NDArray[np.void] | None
    kind: np.dtype[np.void] = PACKED

    def __len__(self) -> int:
        return self.length

    @property
    def records(self) -> NDArray[np.void]:
        """Its tokens. Raises ValueError on a rank that has only its sizes."""
        if self.tokens is None:
            raise ValueError(f"trajectory {self.name} has no tokens on this rank: it belongs to another replica")
        return self.tokens


def token_sequences(trajectories: Iterable[Trajectory], version: int | None = None) -> list[TokenSequence]:
    """Return the sequences of every trajectory, in order. version: of the current weights; None: any counts as current.

    Raises ValueError for a sequence that is empty or starts with a sampled token, which nothing would predict.
    """
    made: list[TokenSequence] = []
    for index, trajectory in enumerate(trajectories):
        for part in trajectory.sequences:
            made.append(_sequence(len(made), index, trajectory, part, version))
    return made


def with_turns(
    sequences: Sequence[TokenSequence],
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float | Sequence[float] | None],
) -> list[TokenSequence]:
    """Return the sequences of these trajectories, `token_sequences`, with the columns `BY_TURN`.

    advantages: of each trajectory, or of each of its turns; None: 0. A prompt has the first one. Raises
    ValueError for a trajectory whose turns are not as many as their advantages.
    """
    parts = [
        (trajectory, group, tokens, values)
        for trajectory, group, values in zip(trajectories, _groups(trajectories), advantages, strict=True)
        for tokens in trajectory.sequences
    ]
    return [
        _with_turns(sequence, trajectory.tokens["turn"], group, tokens, values)
        for sequence, (trajectory, group, tokens, values) in zip(sequences, parts, strict=True)
    ]


def _groups(trajectories: Sequence[Trajectory]) -> Iterator[int]:
    """Number the group of each trajectory, from 0. A group is the samples of one draw of a prompt, in their order."""
    number, last = -1, None
    for trajectory in trajectories:
        if last is None or trajectory.prompt_id != last.prompt_id or trajectory.sample_index <= last.sample_index:
            number += 1
        yield number
        last = trajectory


def _with_turns(
    sequence: TokenSequence,
    turns: NDArray[np.int16],
    group: int,
    part: slice,
    advantage: float | Sequence[float] | None,
) -> TokenSequence:
    records, turn = sequence.records, turns[part]
    tokens = joined([records], np.dtype([*records.dtype.descr, *BY_TURN]))
    tokens["turn"], tokens["group"] = turn, group
    values = np.array(0.0 if advantage is None else advantage, np.float32)
    if values.ndim and values.size != turns.max():
        raise ValueError(f"trajectory {sequence.name}: {values.size} advantages for {turns.max()} turns")
    tokens["advantages"] = np.atleast_1d(values)[np.clip(turn - 1, 0, values.size - 1)]
    return replace(sequence, tokens=tokens, kind=tokens.dtype)


def _sequence(place: int, index: int, trajectory: Trajectory, part: slice, version: int | None) -> TokenSequence:
    """Of the tokens `part`."""
    name = f"{trajectory.prompt_id}#{trajectory.sample_index}"
    given = trajectory.tokens[part]
    if not len(given):
        raise ValueError(f"trajectory {name} has no tokens")
    more = further(given)
    if given["response_mask"][0]:
        raise ValueError(f"trajectory {name} starts with a sampled token; it needs a prompt")
    kind = np.dtype([*PACKED.descr, *((name, values.dtype, values.shape[1:]) for name, values in more.items())])
    tokens = np.zeros(len(given), kind)
    for column in ("token_ids", "rollout_log_probs", "weight_version", "response_mask", "loss_mask", *more):
        tokens[column] = given[column]
    tokens["current"] = given["response_mask"] if version is None else given["weight_version"] == version
    sampled, loss = (int(np.count_nonzero(tokens[mask])) for mask in ("response_mask", "loss_mask"))
    return TokenSequence(place, index, name, len(given), sampled, loss, tokens, tokens.dtype)


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch: sequences laid end to end.

    token_ids, position_ids: [N] int32; cu_seqlens: [B+1] int32, cu_seqlens[0] = 0, cu_seqlens[-1] = N.
    response_mask, loss_mask, current: [N] bool, aligned with the predicted token (0 at the first token of a sequence);
    current: see `TokenArrays`.
    rollout_log_probs, advantages, log_probs, old_log_probs: [N] fp32 (nats). log_probs: of the latest pass over this
    micro-batch; old_log_probs: of the weights before the first update. The policy fills in both, and entropy (`[N]`
    fp32, nats, with old_log_probs).
    correction_weights: [N] fp32, detached factors of the token losses; None: 1 (filled by the policy's correction).
    sequences, lengths: index in the step and number of tokens of each sequence. Alignment may append masked tokens to a
    sequence, inside its boundaries, and one masked, unlisted sequence to the micro-batch.
    on_policy: the weights have not been updated since the batch began, so the old log-probs are the log-probs of the
    training pass itself. packed: the original in host memory, from `pack`; None if this is the original.
    more: further columns of tokens by name, `[N, ...]` of their own types, 0 at alignment. `ROUTER_CHOICES`, hundreds
    of bytes a token, stays in host memory.
    weight_version: [N] int32, of the weights that sampled the token; meaningless where response_mask is 0. version: of
    the trainer's weights when the batch began; None: not known.
    turn: [N] int16, the turn of each token as in `Trajectory`. group: [N] int32, the number of its group in the step.
    Both are None where the loss has no use for them.
    forest: the distinct prefixes, which a pass computes in place of the tokens; None: it computes every token.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    response_mask: torch.Tensor
    loss_mask: torch.Tensor
    current: torch.Tensor
    rollout_log_probs: torch.Tensor
    weight_version: torch.Tensor
    advantages: torch.Tensor
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    log_probs: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    correction_weights: torch.Tensor | None = None
    on_policy: bool = False
    packed: PackedBatch | None = None
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    turn: torch.Tensor | None = None
    group: torch.Tensor | None = None
    version: int | None = None
    forest: Forest | None = None

    @property
    def on_host(self) -> PackedBatch:
        """The original in host memory, so that planning needs no read-back from the device.

        Without `old_log_probs`, and without the correction's changes of `loss_mask`.
        """
        return self.packed or self

    @property
    def num_tokens(self) -> int:
        """N, including alignment."""
        return int(self.token_ids.numel())

    @property
    def distinct_tokens(self) -> int:
        """Tokens of the sequences that a pass computes, without alignment."""
        return sum(self.lengths) if self.forest is None else self.forest.distinct

    @property
    def num_rows(self) -> int:
        """Tokens that a pass computes: N, or the distinct prefixes."""
        return self.num_tokens if self.forest is None else self.forest.rows

    @property
    def max_seqlen(self) -> int:
        return int(self.on_host.cu_seqlens.diff().max())

    def places(self) -> Iterator[tuple[int, slice]]:
        """Index of each sequence in the step, and the slice of its tokens, without alignment."""
        starts = self.on_host.cu_seqlens.tolist()
        for place, start, length in zip(self.sequences, starts, self.lengths, strict=False):
            yield place, slice(start, start + length)

    def to(self, device: torch.device) -> PackedBatch:
        """Return a copy with its tensors on `device`; the host does not wait for the one copy of all."""
        names = [name for name in self.__slots__ if isinstance(getattr(self, name), torch.Tensor)]
        columns = [name for name in self.more if name != ROUTER_CHOICES]
        given = [*(getattr(self, name) for name in names), *(self.more[name] for name in columns)]
        moved = all_to_device(given, device)
        tensors = dict(zip(names, moved, strict=False))
        more = {**self.more, **dict(zip(columns, moved[len(names) :], strict=True))}
        return replace(self, **tensors, more=more, packed=self.on_host)  # type: ignore[arg-type] # only names of tensors


@dataclass(frozen=True)
class PackingRules:
    """What a parallel layout requires of the micro-batches of one rank.

    max_tokens: capacity of a micro-batch. sequence_multiple, batch_multiple: the tokens of every sequence and of every
    micro-batch are padded to a multiple. count_multiple: the number of micro-batches is, too. repeated_token: what each
    further token with the same history takes of the capacity, of which a row takes 1.
    """

    max_tokens: int
    sequence_multiple: int = 1
    batch_multiple: int = 1
    count_multiple: int = 1
    repeated_token: float = 0.0

    def padded(self, tokens: int) -> int:
        """Return the padded length of a sequence of `tokens`."""
        return math.ceil(tokens / self.sequence_multiple) * self.sequence_multiple


def split_evenly(
    sequences: Sequence[TokenSequence], parts: int, costs: Sequence[float] | None = None
) -> list[list[int]]:
    """Distribute sequences over `parts` data-parallel ranks: the costliest first, to the least loaded. Returns indices.

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
    kind: np.dtype[np.void] = PACKED,
    order: PrefixOrder | None = None,
) -> list[PackedBatch]:
    """Pack by first-fit-decreasing, into `at_least` that many micro-batches.

    order: of the step; then tokens with the same history in a micro-batch are one row, and it holds `rules.max_tokens`
    rows, fewer with `rules.repeated_token`. Micro-batches are runs of that order where these are fewer, or as many with
    fewer rows.

    advantages: one per sequence, broadcast to its tokens (None: 0), unless tokens have their own (`BY_TURN`). With more
    micro-batches than sequences, some have one masked sequence: it has no loss, but ranks that wait for each other run
    the same number of passes. kind: a type with the columns of all tokens of the step, which these have, too. The
    result depends only on the arguments. Raises ValueError for a sequence longer than `rules.max_tokens`.
    """
    return [
        _concatenate(
            [sequences[i] for i in members],
            [0.0] * len(members) if advantages is None else [advantages[i] for i in members],
            rules,
            kind,
            share=order is not None,
        )
        for members in _bins(sequences, rules, at_least, order)
    ]


def micro_batch_count(sequences: Sequence[TokenSequence], rules: PackingRules, order: PrefixOrder | None = None) -> int:
    """Return how many micro-batches `pack` makes."""
    return len(_bins(sequences, rules, 0, order))


def _bins(
    sequences: Sequence[TokenSequence], rules: PackingRules, at_least: int, order: PrefixOrder | None
) -> list[list[int]]:
    """Indices of the sequences of each micro-batch."""
    for sequence in sequences:
        if rules.padded(len(sequence)) > rules.max_tokens:
            raise ValueError(
                f"trajectory {sequence.name} has {len(sequence)} tokens, but a micro-batch holds "
                f"{rules.max_tokens} (policy.micro_batch_tokens x policy.context_parallel_size); raise it, or lower "
                "rollout.max_response_tokens"
            )
    bins = _first_fit(sequences, rules)
    if order is not None and bins:
        rows = partial(_rows, sequences, order=order)
        bins = min((_runs(sequences, rules, order), bins), key=lambda found: (len(found), sum(map(rows, found))))
    wanted = math.ceil(max(len(bins), at_least) / rules.count_multiple) * rules.count_multiple
    return _divided(sequences, bins, wanted, runs=order is not None)


def _rows(sequences: Sequence[TokenSequence], members: Sequence[int], order: PrefixOrder) -> int:
    """Rows of a micro-batch of these sequences."""
    lengths = {sequences[i].place: len(sequences[i]) for i in members}
    return sum(lengths[place] - shared for place, shared in order.walk([*lengths]))


def _runs(sequences: Sequence[TokenSequence], rules: PackingRules, order: PrefixOrder) -> list[list[int]]:
    """Micro-batches that are runs of an order, each as long as its rows allow."""
    index = {sequence.place: number for number, sequence in enumerate(sequences)}
    bins, used = list[list[int]](), 0
    for place, shared in order.walk([*index]):
        number = index[place]
        new = rules.padded(len(sequences[number]) - shared) + math.ceil(rules.repeated_token * shared)
        if bins and used + new <= rules.max_tokens:
            bins[-1].append(number)
            used += new
        else:
            bins.append([number])
            used = rules.padded(len(sequences[number]))
    return bins


def _first_fit(sequences: Sequence[TokenSequence], rules: PackingRules) -> list[list[int]]:
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
    return bins


def _divided(
    sequences: Sequence[TokenSequence], bins: list[list[int]], count: int, *, runs: bool = False
) -> list[list[int]]:
    """The same sequences in at least `count` micro-batches: the largest are halved; missing ones are empty.

    runs: neighbours stay together.
    """
    while len(bins) < count:
        divisible = [b for b, members in enumerate(bins) if len(members) > 1]
        if not divisible:
            return bins + [[]] * (count - len(bins))
        largest = max(divisible, key=lambda b: (sum(len(sequences[i]) for i in bins[b]), -b))
        members = bins[largest]
        if runs:
            bins[largest : largest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
            continue
        halves = split_evenly([sequences[i] for i in members], 2)
        bins[largest : largest + 1] = [[members[i] for i in half] for half in halves]
    return bins


def _concatenate(
    chosen: list[TokenSequence],
    advantages: list[float],
    rules: PackingRules,
    kind: np.dtype[np.void],
    *,
    share: bool = False,
) -> PackedBatch:
    lengths = [len(t) for t in chosen]
    sizes = [rules.padded(length) for length in lengths]
    multiple = math.lcm(rules.sequence_multiple, rules.batch_multiple)
    filler = -sum(sizes) % multiple if chosen else multiple
    if filler:
        sizes.append(filler)
    starts = np.cumsum([0, *sizes])

    kind = common_type([kind, *(sequence.kind for sequence in chosen)])
    tokens = np.zeros(sum(sizes), kind)
    for start, sequence in zip(starts, chosen, strict=False):
        records = sequence.records
        for name in records.dtype.names or ():
            tokens[name][start : start + len(records)] = records[name]

    def flat(column: str) -> torch.Tensor:
        return torch.from_numpy(tokens[column].copy())

    # In numpy: torch wakes all its threads for arrays of this size, and they spin afterwards.
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], sizes)
    weights = np.array([*advantages, *[0.0] * bool(filler)], np.float32)
    by_turn = "turn" in (kind.names or ())
    forest = Forest.of(tokens["token_ids"], starts.tolist(), rules.batch_multiple) if share else None
    if forest is not None and forest.rows > LEAST_SHARED * len(tokens):
        forest = None
    return PackedBatch(
        token_ids=flat("token_ids"),
        position_ids=torch.from_numpy(positions.astype(np.int32)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        response_mask=flat("response_mask"),
        loss_mask=flat("loss_mask"),
        current=flat("current"),
        rollout_log_probs=flat("rollout_log_probs"),
        weight_version=flat("weight_version"),
        advantages=flat("advantages") if by_turn else torch.from_numpy(np.repeat(weights, sizes)),
        sequences=tuple(sequence.place for sequence in chosen),
        lengths=tuple(lengths),
        more={name: flat(name) for name in further(tokens)},
        turn=flat("turn") if by_turn else None,
        group=flat("group") if by_turn else None,
        forest=forest,
    )
