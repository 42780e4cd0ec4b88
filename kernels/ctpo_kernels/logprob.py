"""Log-probs of labels from given logits whose vocabulary may be split over a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import dispatch, rows_torch
from ctpo_kernels import labels as arguments
from ctpo_kernels.rows_torch import EntropyGradient, Merged, Shard

SCRATCH_BYTES = 64 << 20
"""Memory for float copies of logit rows in the torch backend."""


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    *,
    vocab_size: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[label] of each row, computed in float32 (float64 for float64 logits).

    logits: `[N, V / tp]`, this rank's columns, differentiable. labels: `[N]` global ids; -100 gives log-prob 0 and no
        gradient. Another label outside the vocabulary: ValueError on the CPU, NaN in its row on CUDA.
    inplace_backward: the gradient overwrites the logits, so nothing else may use them afterwards; autograd refuses a
        second backward pass. ValueError for logits whose rows share memory (`expand`).
    vocab_size: real vocabulary over all ranks; the columns beyond it are padding and are ignored.

    Returns float32 nats `[N]`, with `return_entropy` also the entropy of each row (nats,
    differentiable). Saves the logits and two numbers a row; collectives: one all-gather of 16 bytes a row in the
    forward pass, none in the backward.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating-point [N, V]; got {logits.dtype} {list(logits.shape)}")
    if inplace_backward and any(n > 1 and step == 0 for n, step in zip(logits.shape, logits.stride(), strict=True)):
        raise ValueError("inplace_backward: rows of the logits share memory (expand): pass inplace_backward=False")
    labels = arguments.checked(logits.shape[0], labels, logits.device, temperature)
    group = arguments.effective(tp_group)
    shard = arguments.shard_of(logits.shape[1], vocab_size, group)
    arguments.check_range(labels, vocab_size or logits.shape[1] * (group.size() if group else 1))
    log_probs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        logits, labels, group, shard, temperature, return_entropy, inplace_backward
    )
    return (log_probs, entropy) if return_entropy else log_probs


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        shard: Shard,
        temperature: float,
        entropy: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor]:
        merged = forward_pass(logits, labels, group, shard, temperature, entropy=entropy)
        ctx.save_for_backward(logits, labels, merged.lse, merged.entropy)
        ctx.shard, ctx.temperature, ctx.inplace = shard, temperature, inplace
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(merged.entropy)
        return merged.log_probs, merged.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, lse, value = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
        upstreams = (upstream, d_entropy)
        backward_pass(out, logits, labels, lse, value, *upstreams, ctx.shard, ctx.temperature)
        if ctx.inplace:  # autograd does not see what a kernel writes
            torch.autograd.graph.increment_version(logits)
        return out, *[None] * 6


def forward_pass(
    logits: Tensor,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    shard: Shard,
    temperature: float,
    *,
    entropy: bool,
) -> Merged:
    """Log-probs, lse and entropies of checked rows."""
    parts = _parts(logits, labels, shard, temperature, entropy=entropy)
    return merge(arguments.gather_parts(parts, group), labels, temperature)


def backward_pass(
    out: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    value: Tensor,
    upstream: Tensor | None,
    d_entropy: Tensor | None,
    shard: Shard,
    temperature: float,
) -> None:
    """Write the gradient to `out`, which may be the logits; lse, value (the entropies): of the forward pass."""
    g = upstream_of_labels(upstream, labels, lse)
    entropy = None if d_entropy is None else EntropyGradient(value, d_entropy.contiguous())
    if dispatch.choose(lse) == "triton":
        from ctpo_kernels import rows_triton

        rows_triton.gradient_into(out, logits, lse, labels, g, shard, temperature, entropy=entropy)
        return
    for rows in _row_slices(logits):
        part = logits[rows].to(lse.dtype, copy=True)
        extra = None if entropy is None else entropy.rows(rows)
        out[rows] = rows_torch.gradient(part, lse[rows], labels[rows], g[rows], shard, temperature, entropy=extra)


def upstream_of_labels(upstream: Tensor | None, labels: Tensor, like: Tensor) -> Tensor:
    """Derivatives with respect to the log-probs, 0 at ignored labels and where autograd has none."""
    if upstream is None:
        return torch.zeros_like(like)
    return torch.where(labels == rows_torch.IGNORED_LABEL, 0.0, upstream)


def merge(parts: Tensor, labels: Tensor, temperature: float, out: Tensor | None = None) -> Merged:
    """`rows_torch.merge_stats` by the backend of the tensors."""
    if dispatch.choose(parts) == "triton":
        from ctpo_kernels import rows_triton

        return rows_triton.merge_stats(parts, labels, temperature, out)
    return rows_torch.merge_stats(parts, labels, temperature, out)


def _parts(logits: Tensor, labels: Tensor, shard: Shard, temperature: float, *, entropy: bool) -> Tensor:
    """Statistics `[N, 4]` of this rank's columns; the logits are not changed."""
    if dispatch.choose(logits) == "triton":
        from ctpo_kernels import rows_triton

        return rows_triton.row_stats(logits, labels, shard, temperature, entropy=entropy)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    parts = [
        rows_torch.row_stats(logits[rows].to(dtype, copy=True), labels[rows], shard, temperature, entropy=entropy)
        for rows in _row_slices(logits)
    ]
    return torch.cat(parts) if parts else logits.new_empty(0, 4, dtype=dtype)


def _row_slices(logits: Tensor) -> list[slice]:
    rows = max(1, SCRATCH_BYTES // (4 * max(1, logits.shape[1])))
    return [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
