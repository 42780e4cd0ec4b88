"""Exact prefixes when every sequence is cut over a context-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels.packed import PackedTokens


def halves(cu: Tensor) -> Tensor:
    """Boundaries `[2B + 1]` of the two pieces of every sequence, from local boundaries `[B + 1]`.

    Raises ValueError for an odd local length where `cu` lies on the CPU.
    """
    lengths = cu.diff()
    if cu.device.type == "cpu" and bool((lengths % 2).any()):
        raise ValueError(f"cp_group: a rank holds two equal pieces of every sequence; local lengths {lengths.tolist()}")
    middle = cu[:-1] + lengths // 2
    return torch.cat([torch.stack([cu[:-1], middle], dim=1).reshape(-1), cu[-1:]])


def zigzag(totals: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Initial state and whole-sequence totals of this rank's pieces; one all-gather of 32 bytes a piece.

    totals: int64 `[2B, 4]` of the local pieces (r and 2R - 1 - r of 2R, alternating). Returns state `[2B, 3]` and
    totals `[2B, 4]`. Integer sums: the same bits for every group size.
    """
    size, rank = group.size(), group.rank()
    gathered = totals.new_empty(size * totals.shape[0], 4)
    dist.all_gather_into_tensor(gathered, totals.contiguous(), group=group)
    mine = gathered.view(size, -1, 2, 4)  # rank, sequence, piece
    in_order = torch.cat([mine[:, :, 0], mine[:, :, 1].flip(0)])  # piece of the sequence, sequence, column
    before = in_order.cumsum(0) - in_order
    state = torch.stack([before[rank], before[2 * size - 1 - rank]], dim=1).reshape(-1, 4)
    whole = in_order.sum(0).repeat_interleave(2, dim=0)
    return state[:, :3].contiguous(), whole


def pieces(batch: PackedTokens) -> PackedTokens:
    """Return the same tokens with every local sequence as its two pieces; values per sequence are repeated."""
    return batch.spread(2, halves(batch.cu))
