"""Packs trajectories into micro-batches of flat tokens; what one forward pass of the policy sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ctpo_megatron.data.records import Trajectory


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch: sequences laid end to end, no padding between them.

    token_ids, position_ids: [N] int64; cu_seqlens: [B+1] int32, cu_seqlens[0] = 0, cu_seqlens[-1] = N.
    model_mask, loss_mask: [N] bool, aligned with the token that is predicted (the first token of a sequence is 0).
    behaviour_logp, advantages, anchor_logp: [N] fp32 (nats; anchor_logp is filled by the policy's anchor pass).
    sequences: (prompt id, sample index) of each sequence; a trailing alignment sequence is not listed.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    model_mask: torch.Tensor
    loss_mask: torch.Tensor
    behaviour_logp: torch.Tensor
    advantages: torch.Tensor
    sequences: tuple[tuple[str, int], ...]
    anchor_logp: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.numel())

    @property
    def max_seqlen(self) -> int:
        return int(self.cu_seqlens.diff().max())

    def to(self, device: torch.device) -> PackedBatch:
        """The same micro-batch with its tensors on `device`."""
        moved = {
            name: value.to(device, non_blocking=True)
            if isinstance(value := getattr(self, name), torch.Tensor)
            else value
            for name in self.__slots__
        }
        return PackedBatch(**moved)


def split_evenly(trajectories: Sequence[Trajectory], parts: int) -> list[list[int]]:
    """Indices of the trajectories for each of `parts` data-parallel ranks, balanced by token count (longest first)."""
    most = math.ceil(len(trajectories) / parts)
    loads = [0] * parts
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(trajectories)), key=lambda i: (-len(trajectories[i]), i)):
        target = min(range(parts), key=lambda p: (len(result[p]) >= most, loads[p], p))
        result[target].append(index)
        loads[target] += len(trajectories[index])
    return [sorted(part) for part in result]


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None,
    *,
    max_tokens: int,
    multiple_of: int = 1,
) -> list[PackedBatch]:
    """Pack into as few micro-batches of at most `max_tokens` tokens as first-fit-decreasing finds.

    advantages: one per trajectory, broadcast to its tokens (None: 0). multiple_of: the token count of every
    micro-batch is filled up to a multiple (tensor-parallel size under sequence parallelism) with one masked
    sequence at its end. The result depends only on the arguments. Raises ValueError for a trajectory that is
    empty, longer than `max_tokens`, or starts with a model token.
    """
    for t in trajectories:
        if not 0 < len(t) <= max_tokens:
            raise ValueError(
                f"trajectory {t.prompt_id}#{t.sample_index} has {len(t)} tokens, but policy.micro_batch_tokens is "
                f"{max_tokens}; raise it, or lower rollout.max_response_tokens"
            )
        if t.model_mask[0]:
            raise ValueError(f"trajectory {t.prompt_id}#{t.sample_index} starts with a model token; it needs a prompt")
    bins: list[tuple[list[int], int]] = []
    for index in sorted(range(len(trajectories)), key=lambda i: (-len(trajectories[i]), i)):
        length = len(trajectories[index])
        place = next((b for b, (_, used) in enumerate(bins) if used + length <= max_tokens), None)
        if place is None:
            bins.append(([index], length))
        else:
            members, used = bins[place]
            bins[place] = ([*members, index], used + length)
    return [_concatenate(trajectories, advantages, members, multiple_of) for members, _ in bins]


def _concatenate(
    trajectories: Sequence[Trajectory], advantages: Sequence[float] | None, members: list[int], multiple_of: int
) -> PackedBatch:
    chosen = [trajectories[i] for i in members]
    lengths = [len(t) for t in chosen]
    filler = -sum(lengths) % multiple_of
    if filler:
        lengths.append(filler)

    def flat(field: str, dtype: torch.dtype) -> torch.Tensor:
        values = [value for t in chosen for value in getattr(t, field)]
        return torch.tensor(values + [0] * filler, dtype=dtype)

    sizes = torch.tensor(lengths)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = sizes.cumsum(0)
    per_sequence = [0.0 if advantages is None else advantages[i] for i in members] + [0.0] * bool(filler)
    return PackedBatch(
        token_ids=flat("token_ids", torch.int64),
        position_ids=torch.arange(int(sizes.sum())) - cu_seqlens[:-1].long().repeat_interleave(sizes),
        cu_seqlens=cu_seqlens,
        model_mask=flat("model_mask", torch.bool),
        loss_mask=flat("loss_mask", torch.bool),
        behaviour_logp=flat("behaviour_logp", torch.float32),
        advantages=torch.tensor(per_sequence).repeat_interleave(sizes),
        sequences=tuple((t.prompt_id, t.sample_index) for t in chosen),
    )
