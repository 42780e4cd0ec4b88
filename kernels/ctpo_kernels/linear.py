"""Log-probs of hidden states through the output layer, logits in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import labels as arguments
from ctpo_kernels.linear_head import HeadOptions, LinearHead
from ctpo_kernels.logprob import upstream_of_labels
from ctpo_kernels.operands import (
    active_rows,
    check_operands,
    gather_hidden,
    pick,
    product_dtype,
    reduce_d_hidden,
    scatter,
)
from ctpo_kernels.rows_torch import EntropyGradient


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    *,
    vocab_size: int | None = None,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(hidden weight^T / temperature)[label] of each row without the logits of all rows.

    hidden: `[N, H]`, or `[N / tp, H]` with `sequence_parallel`; weight: `[V / tp, H]`; both differentiable. Operands of
        two dtypes are multiplied in the lower precision. Accumulation is in float32, and each gradient has the dtype of
        its operand.
    labels: `[N]` global ids; -100 gives 0 and no gradient. mask: `[N]`, rows to evaluate; the others give 0.
    rows: int64 `[M]`, ascending, the rows where mask is not 0, if the caller knows them: saves a synchronisation on
        CUDA.
    chunk_size: rows whose logits exist at a time. The bits depend on it, so the default is the same on every GPU,
        whatever memory is free (`chunks.CHUNK_BYTES`); `chunk_rows` chooses one that suits a GPU.
    vocab_size: as `vocab_parallel_log_probs`.

    Returns float32 nats `[N]` (float64 for float64 operands); with `return_entropy` also the entropy (nats,
    differentiable). Forward: one matrix product (2 M H V operations); backward: three, since logits are computed again.
    The same rows in the same chunks give the same bits as `fused_linear_ctpo`: use it for the anchor pass.
    """
    group = arguments.effective(tp_group)
    labels = check_operands(hidden, weight, labels, group, sequence_parallel, temperature)
    n = labels.numel()
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(f"mask has shape {list(mask.shape)}; expected {list(labels.shape)}")
    head = HeadOptions(group, temperature, vocab_size, chunk_size, product_dtype(hidden, weight))
    active = None if mask is None else active_rows(mask != 0, rows)
    chosen = pick(labels, active)
    arguments.check_range(chosen, vocab_size or weight.shape[0] * (group.size() if group else 1))
    log_probs, entropy = _LinearLogProbs.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        hidden, weight, chosen, active, n, sequence_parallel, return_entropy, head
    )
    return (log_probs, entropy) if return_entropy else log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: Tensor | None,
        n: int,
        sequence_parallel: bool,
        entropy: bool,
        options: HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        log_probs, lse, entropies = forward_pass(hidden, weight, labels, rows, sequence_parallel, entropy, options)
        ctx.save_for_backward(hidden, weight, labels, rows, lse, entropies)
        ctx.options, ctx.n, ctx.sequence_parallel = options, n, sequence_parallel
        ctx.set_materialize_grads(False)
        entropies = scatter(entropies.clone(), rows, n)  # saved and returned must be two tensors
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return scatter(log_probs, rows, n), entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, rows, lse, value = ctx.saved_tensors
        saved = (hidden, weight, labels, rows, lse, value)
        shared = (ctx.n, ctx.sequence_parallel, ctx.options, ctx.needs_input_grad)
        d_hidden, d_weight = backward_pass(*saved, upstream, d_entropy, *shared)
        return d_hidden, d_weight, *[None] * 6


def forward_pass(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    sequence_parallel: bool,
    entropy: bool,
    options: HeadOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, lse and entropies `[M]` of the rows; labels: `[M]`."""
    x = pick(gather_hidden(hidden, options.group, sequence_parallel), rows)
    head = LinearHead(x, weight, labels, options)
    found = [head.log_probs(start, end, entropy=entropy) for start, end in head.chunks()]
    none = x.new_empty(0, dtype=head.dtype)
    log_probs, lse, entropies = (
        torch.cat([none, *(getattr(merged, name) for merged in found)]) for name in ("log_probs", "lse", "entropy")
    )
    return log_probs, lse, entropies


def backward_pass(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Tensor | None,
    lse: Tensor,
    value: Tensor,
    upstream: Tensor | None,
    d_entropy: Tensor | None,
    n: int,
    sequence_parallel: bool,
    options: HeadOptions,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the requested gradients of hidden and weight. lse, value, labels: `[M]`; upstream, d_entropy: `[N]`."""
    group = options.group
    x = pick(gather_hidden(hidden, group, sequence_parallel), rows)
    head = LinearHead(x, weight, labels, options)
    g = upstream_of_labels(None if upstream is None else pick(upstream, rows), labels, lse)
    entropy = None if d_entropy is None else EntropyGradient(value, pick(d_entropy, rows).contiguous())
    d_hidden = torch.empty_like(x) if wanted[0] else None
    d_weight = torch.zeros_like(weight, dtype=head.dtype) if wanted[1] else None
    for start, end in head.chunks():
        part = g[start:end]
        extra = None if entropy is None else entropy.rows(slice(start, end))
        dz = head.recomputed_gradient_rows(start, end, lse[start:end], part, extra)
        head.accumulate(dz, start, d_hidden, d_weight, [(0, end - start)])
    if d_hidden is not None:
        d_hidden = reduce_d_hidden(scatter(d_hidden, rows, n), group, sequence_parallel)
    return d_hidden, None if d_weight is None else d_weight.to(weight.dtype)
