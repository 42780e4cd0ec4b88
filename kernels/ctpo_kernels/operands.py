"""Hidden states and weight of an output layer: their checks, their rows on other ranks, and the active rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import labels as arguments


def gather_hidden(hidden: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Rows of all tensor-parallel ranks in rank order, `[N / tp, H]` -> `[N, H]`, under sequence parallelism."""
    if group is None or not sequence_parallel:
        return hidden
    full = hidden.new_empty(hidden.shape[0] * group.size(), hidden.shape[1])
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=group)
    return full


def reduce_d_hidden(d_hidden: Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """Sum over the vocabulary shards: `[N, H]`, or this rank's `[N / tp, H]` under sequence parallelism."""
    if group is None:
        return d_hidden
    if not sequence_parallel:
        dist.all_reduce(d_hidden, group=group)
        return d_hidden
    mine = d_hidden.new_empty(d_hidden.shape[0] // group.size(), d_hidden.shape[1])
    dist.reduce_scatter_tensor(mine, d_hidden, group=group)
    return mine


def check_operands(
    hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, sp: bool, temperature: float
) -> Tensor:
    """Return the labels `[N]` as `labels.checked` returns them; raises ValueError or TypeError naming what does not
    fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {list(hidden.shape)}, {list(weight.shape)}")
    if hidden.device != weight.device:
        raise ValueError(f"weight is on {weight.device}, hidden on {hidden.device}: move it")
    n = hidden.shape[0] * (group.size() if sp and group is not None else 1)
    return arguments.checked(n, labels, hidden.device, temperature)


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the matrix product: the common one, or the lower precision of two.

    Raises TypeError for float16 with bfloat16, for float64 with another dtype, and for a dtype that is not floating.
    """
    kinds = {hidden.dtype, weight.dtype}
    low = kinds - {torch.float32}
    if not kinds <= {torch.float64, torch.float32, torch.bfloat16, torch.float16} or len(low) > 1:
        raise TypeError(f"hidden and weight have no common floating dtype: {hidden.dtype} and {weight.dtype}")
    if torch.float64 in kinds and len(kinds) > 1:
        raise TypeError(f"hidden and weight must both be float64 or neither: {hidden.dtype} and {weight.dtype}")
    return next(iter(low or kinds))


def active_rows(mask: Tensor, known: Tensor | None = None) -> Tensor | None:
    """int64 `[M]`, the rows where a bool mask is set; None when it is set everywhere.

    known: these rows, if the caller has them, because finding them synchronises on CUDA. Raises ValueError when they
    are wrong, which is checked on the CPU only.
    """
    if known is None or mask.device.type == "cpu":
        rows = mask.nonzero().squeeze(1)
        if known is not None and not known.equal(rows):
            raise ValueError(f"rows lists {known.numel()} rows, not the {rows.numel()} where the mask is set")
    else:
        rows = known
    return None if rows.numel() == mask.numel() else rows


def pick(values: Tensor, rows: Tensor | None) -> Tensor:
    """`values[rows]`, without a copy when rows is None (all of them)."""
    return values if rows is None else values.index_select(0, rows)


def scatter(values: Tensor, rows: Tensor | None, n: int) -> Tensor:
    """Inverse of `pick`: zeros elsewhere."""
    return values if rows is None else values.new_zeros(n, *values.shape[1:]).index_copy_(0, rows, values)


def accumulation_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which logits, losses and weight gradients are accumulated."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32
