"""Distributes rank zero's trajectories of a step: all sizes to every rank, tokens to the ranks that train on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_megatron.data import TokenArrays, TokenSequence
from ctpo_megatron.policy.parallel import Layout

_LOSS, _RESPONSE, _CURRENT = 1, 2, 4
"""Bits of the byte that carries the masks of a token."""


def share_sizes(
    sequences: Sequence[TokenSequence], advantages: Sequence[float], layout: Layout
) -> tuple[list[TokenSequence], list[float]]:
    """The sequences of rank zero without their tokens, and their advantages, on every rank; collective.

    Sends int64 `[3, B]` and float64 `[B]`. Ranks other than zero pass empty sequences. Rank zero keeps its tokens.
    """
    if layout.world_size == 1:
        return list(sequences), list(advantages)
    count = torch.tensor([len(sequences)])
    dist.broadcast(count, src=0)
    sizes = torch.zeros(3, int(count), dtype=torch.int64)
    values = torch.zeros(int(count), dtype=torch.float64)
    if layout.is_rank_zero:
        sizes[:] = torch.tensor([[s.length, s.sampled_tokens, s.loss_tokens] for s in sequences]).T
        values[:] = torch.tensor(advantages, dtype=torch.float64)
    dist.broadcast(sizes, src=0)
    dist.broadcast(values, src=0)
    if layout.is_rank_zero:
        return list(sequences), list(advantages)
    outline = [
        TokenSequence(place, f"{place} of the step", length, sampled, loss, None)
        for place, (length, sampled, loss) in enumerate(sizes.T.tolist())
    ]
    return outline, values.tolist()


def share_tokens(
    sequences: Sequence[TokenSequence], shares: Sequence[Sequence[int]], layout: Layout
) -> list[TokenSequence]:
    """This rank's share with its tokens; collective.

    sequences: from `share_sizes`. shares: the indices that each data-parallel rank trains on. A token is sent as int32
    id, one byte of masks and float32 log-prob, to the ranks of the replica that trains on it.
    """
    own = [sequences[index] for index in shares[layout.dp_rank]]
    if layout.world_size == 1:
        return own
    if not layout.is_rank_zero:
        return _receive(own)
    sending: list[dist.Work] = []
    for rank in range(1, layout.world_size):
        sending += _send(sequences, shares, rank, layout)
    # All sends are queued before the first wait, so that ranks receive in parallel.
    for work in sending:
        work.wait()
    return own


def tokens_of(sequence: TokenSequence) -> TokenArrays:
    """The tokens of a sequence. Raises ValueError on a rank that has only its sizes."""
    if sequence.tokens is None:
        raise ValueError(f"{sequence.name} has no tokens on this rank")
    return sequence.tokens


def _send(
    sequences: Sequence[TokenSequence], shares: Sequence[Sequence[int]], rank: int, layout: Layout
) -> Iterator[dist.Work]:
    arrays = [tokens_of(sequences[index]) for index in shares[layout.dp_ranks[rank]]]
    if not arrays:
        return
    for column in _columns(arrays):
        work = dist.isend(column, dst=rank)
        if work is None:
            raise RuntimeError(f"rank {rank} is not in the job's process group")
        yield work


def _receive(own: Sequence[TokenSequence]) -> list[TokenSequence]:
    if not own:
        return []
    total = sum(len(sequence) for sequence in own)
    columns = [torch.zeros(total, dtype=dtype) for dtype in (torch.int32, torch.uint8, torch.float32)]
    for column in columns:
        dist.recv(column, src=0)
    ids, masks, log_probs = (column.numpy() for column in columns)
    ends = np.cumsum([len(sequence) for sequence in own])
    result = []
    for sequence, end in zip(own, ends, strict=True):
        part = slice(end - len(sequence), end)
        bits = masks[part]
        response, loss, current = ((bits & bit) != 0 for bit in (_RESPONSE, _LOSS, _CURRENT))
        tokens = TokenArrays(ids[part], response, loss, current, log_probs[part])
        result.append(
            TokenSequence(
                sequence.place, sequence.name, sequence.length, sequence.sampled_tokens, sequence.loss_tokens, tokens
            )
        )
    return result


def _columns(arrays: Sequence[TokenArrays]) -> tuple[Tensor, Tensor, Tensor]:
    """int32 ids, uint8 masks, float32 log-probs, each `[N]`, of sequences laid end to end."""
    ids = np.concatenate([tokens.token_ids for tokens in arrays])
    masks = np.concatenate(
        [_LOSS * each.loss_mask + _RESPONSE * each.response_mask + _CURRENT * each.current for each in arrays]
    )
    log_probs = np.concatenate([tokens.rollout_log_probs for tokens in arrays])
    return torch.from_numpy(ids), torch.from_numpy(masks.astype(np.uint8)), torch.from_numpy(log_probs)
