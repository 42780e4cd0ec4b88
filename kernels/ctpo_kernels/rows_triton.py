"""Launches the Triton row kernels; what they compute is described in `rows_torch`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ctpo_kernels import dispatch
from ctpo_kernels import rows_kernels as kernels
from ctpo_kernels.rows_torch import EntropyGradient, Merged, Shard

# (BLOCK, num_warps): a row is long (152k columns), so blocks are as large as registers allow.
STATS = (8192, 16)
GRADIENT = (8192, 16)
MERGE = (256, 4)


def _block(columns: int, largest: int) -> int:
    return max(16, min(largest, int(triton.next_power_of_2(columns))))


def row_stats(logits: Tensor, labels: Tensor, shard: Shard, temperature: float, *, entropy: bool) -> Tensor:
    """Statistics float32 `[C, 4]` as `rows_torch.row_stats`; the logits (any float dtype) are not changed."""
    rows, columns = logits.shape
    parts = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    if rows:
        logits = _unit_stride(logits)
        dispatch.launch(
            kernels.row_stats_kernel,
            rows,
            logits,
            logits.stride(0),
            labels,
            parts,
            shard.start,
            shard.valid,
            1.0 / temperature,
            BLOCK=_block(columns, STATS[0]),
            ENTROPY=entropy,
            num_warps=STATS[1],
        )
    return parts


def merge_stats(parts: Tensor, labels: Tensor, temperature: float, out: Tensor | None = None) -> Merged:
    """As `rows_torch.merge_stats`, in one launch."""
    shards, rows, _ = parts.shape
    log_probs, lse, entropy = torch.empty(3, rows, dtype=torch.float32, device=parts.device).unbind()
    log_probs = log_probs if out is None else out
    if rows:
        dispatch.launch(
            kernels.merge_kernel,
            triton.cdiv(rows, MERGE[0]),
            parts.contiguous(),
            labels,
            log_probs,
            lse,
            entropy,
            rows,
            1.0 / temperature,
            SHARDS=shards,
            BLOCK=MERGE[0],
            num_warps=MERGE[1],
        )
    return Merged(log_probs, lse, entropy)


def gradient_into(
    out: Tensor,
    logits: Tensor,
    lse: Tensor,
    labels: Tensor,
    g: Tensor,
    shard: Shard,
    temperature: float,
    *,
    entropy: EntropyGradient | None = None,
) -> None:
    """Write `rows_torch.gradient` to out `[C, V]`, which may be the logits or the first part of each of their rows."""
    rows, columns = logits.shape
    if not rows:
        return
    if out.stride(-1) != 1:
        dense = torch.empty(rows, columns, dtype=out.dtype, device=out.device)
        gradient_into(dense, logits, lse, labels, g, shard, temperature, entropy=entropy)
        out.copy_(dense)
        return
    source = _unit_stride(logits)
    same_memory = out.data_ptr() == source.data_ptr()
    dispatch.launch(
        kernels.gradient_kernel,
        rows,
        source,
        source.stride(0),
        out,
        out.stride(0),
        labels,
        lse,
        g,
        shard.start,
        shard.valid,
        columns,
        1.0 / temperature,
        lse if entropy is None else entropy.value,  # stands in for pointers that the kernel does not read
        lse if entropy is None else entropy.g,
        BLOCK=_block(columns, GRADIENT[0]),
        OVERLAPPING=same_memory and out.dtype != source.dtype,
        ENTROPY=entropy is not None,
        num_warps=GRADIENT[1],
    )


def _unit_stride(logits: Tensor) -> Tensor:
    """Rows may have gaps (a slice of a wider tensor), columns may not."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()
