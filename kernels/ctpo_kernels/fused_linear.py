"""Output layer, log-probs, loss and all gradients in one sweep over the tokens, without the logits of all of them.

The cumulative ratio of a token needs only tokens up to it, so while its chunk's logits are at hand everything that its
gradient needs is known: three matrix products in all, none of them again in a backward pass. Ratios of the whole
sequence need tokens that come later: their logits are computed twice (four products).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import context_parallel
from ctpo_kernels import labels as arguments
from ctpo_kernels.entropy import EntropyBonus, rows_with_gradient
from ctpo_kernels.linear_head import LinearHead
from ctpo_kernels.loss import loss_implementation, whole_pass
from ctpo_kernels.operands import (
    active_rows,
    check_operands,
    flat_operands,
    gather_hidden,
    pick,
    reduce_d_hidden,
    scatter,
)
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import LossKeywords, LossSpec
from ctpo_kernels.stats import CTPOStats


def fused_linear_ctpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    response_mask: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    clip_low: float = 0.025,
    clip_high: float = 0.05,
    clip_c: float | None = 0.05,
    clip_power: float = 0.5,
    clip_mode: str = "log_power",
    ratio_mode: str = "cumprod",
    loss_mask: Tensor | None = None,
    weights: Tensor | None = None,
    loss_agg_mode: str = "seq-mean-token-mean",
    loss_scale_factor: float = 1.0,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    accumulate_into_main_grad: bool = False,
    skip_zero_tiles: bool = True,
    return_entropy: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, CTPOStats, Tensor] | tuple[Tensor, CTPOStats, Tensor, Tensor]:
    """`ctpo_loss(linear_log_probs(hidden, weight, labels), ...)` with its gradients, computed in the forward pass.

    hidden, weight, labels, temperature, softcap, vocab_size, tp_group, sequence_parallel, chunk_size: as
        `linear_log_probs`. Row i of hidden predicts labels[i]; everything per token is aligned with labels. All others:
        as `ctpo_loss`; old_log_probs None means on-policy. Rows whose response_mask is 0 are dropped before the first
        matrix product.
    entropy_coef: subtract this times the entropy of the loss tokens, aggregated as the loss is, without
        `weights`. No further matrix product; the statistics stay those of the policy loss alone.
    accumulate_into_main_grad: add the weight gradient (float32) to `weight.main_grad` in the forward pass, as
        megatron-core's fused layers do in the backward: sets `weight.grad_added_to_main_grad` and hands autograd a
        placeholder. The upstream scalar must then be 1 (checked in the backward, on CUDA by a device-side assertion).
    skip_zero_tiles: leave out tiles of 128 rows without any gradient (clipped, or advantage 0) in the two gradient
        products; exact, and costs one small read-back a chunk.
    rows: int64 `[M]`, where response_mask is not 0, ascending, from a caller who knows.

    Returns the loss (differentiable in hidden and weight), its statistics, and the log-probs: float32 in the shape of
    labels, detached, 0 where the response mask is 0; with `return_entropy` also the entropies, likewise. One backward
    per forward: a second one raises RuntimeError. Without grad mode only the log-probs and the loss are computed. CUDA:
    synchronises once for the number of rows, unless they are given.
    """
    shape = labels.shape
    hidden, labels = flat_operands(hidden, labels, sequence_parallel)
    keywords = (clip_low, clip_high, clip_c, clip_power, clip_mode, ratio_mode, loss_agg_mode, loss_scale_factor)
    spec = LossSpec.of(LossKeywords(*keywords))
    group = arguments.effective(tp_group)
    labels = check_operands(hidden, weight, labels, group, sequence_parallel, temperature)
    n = labels.numel()
    if accumulate_into_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("accumulate_into_main_grad: weight has no main_grad (megatron's DDP makes it)")
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # The loss fills in the log-probs as they come.
    log_probs = torch.zeros(shape, dtype=dtype, device=hidden.device)
    full = PackedTokens.of(log_probs, old_log_probs, response_mask, advantages, cu_seqlens, loss_mask, weights)
    cp_group = arguments.effective(cp_group)
    spec.require_global_counts(cp_group, batch_num_tokens)
    inverse = spec.inverse_denominator(batch_num_tokens, global_batch_size, full)
    if cp_group is not None:
        full = context_parallel.pieces(full)
    active = active_rows(full.sampled, rows)
    if active is None:
        batch = full
    else:
        kept_before = torch.nn.functional.pad(full.sampled.long().cumsum(0), (1, 0))
        batch = full.select(active, kept_before[full.cu])
    plan = _Plan(
        batch=batch,
        spec=spec,
        inverse=inverse,
        rows=active,
        tokens=n,
        labels=pick(labels, active),
        cp_group=cp_group,
        sequence_parallel=sequence_parallel,
        into_main_grad=accumulate_into_main_grad,
        skip=skip_zero_tiles,
        differentiate=torch.is_grad_enabled(),
        entropy_coef=entropy_coef,
        entropy=return_entropy or entropy_coef != 0,
        head={
            "group": group,
            "temperature": temperature,
            "vocab_size": vocab_size,
            "chunk_size": chunk_size,
            "softcap": arguments.checked_softcap(softcap),
            "entropy_gradient": entropy_coef != 0,
        },
    )
    arguments.check_range(plan.labels, vocab_size or weight.shape[0] * (group.size() if group else 1))
    loss, vector, log_probs, entropy = _Sweep.apply(hidden, weight, plan)  # type: ignore[no-untyped-call]  # torch's
    found = (loss, CTPOStats.from_vector(vector), log_probs.view(shape))
    return (*found, entropy.view(shape)) if return_entropy else found


@dataclass(frozen=True)
class _Plan:
    """Everything of a call that is no operand. batch, labels: of the response tokens only; rows: where they are."""

    batch: PackedTokens
    spec: LossSpec
    inverse: float | Tensor
    rows: Tensor | None
    tokens: int
    labels: Tensor
    cp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    into_main_grad: bool
    skip: bool
    differentiate: bool
    entropy_coef: float
    entropy: bool
    head: dict[str, Any]


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, plan: _Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        group = plan.head["group"]
        x = pick(gather_hidden(hidden, group, plan.sequence_parallel), plan.rows)
        head = LinearHead(x, weight, plan.labels, **plan.head)
        # Without grad mode autograd still asks for the gradients of its leaves.
        want_hidden, want_weight = (needed and plan.differentiate for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(x) if want_hidden else None
        d_weight = None
        if want_weight:
            d_weight = _main_grad(weight) if plan.into_main_grad else torch.zeros_like(weight, dtype=head.dtype)

        def accumulate(dz: Tensor, start: int, g: Tensor) -> None:
            head.accumulate(dz, start, g, d_hidden, d_weight, skip=plan.skip)

        two_phases = plan.spec.whole_sequence or plan.cp_group is not None
        sweep = _twice if two_phases else _once
        bonus = EntropyBonus(plan.batch, plan.spec, plan.inverse, plan.cp_group, plan.entropy_coef)
        log_probs, vector = sweep(head, plan, bonus, accumulate if want_hidden or want_weight else None)

        if d_hidden is not None:
            d_hidden = reduce_d_hidden(scatter(d_hidden, plan.rows, plan.tokens), group, plan.sequence_parallel)
        ctx.gradients = (d_hidden, d_weight)
        ctx.weight, ctx.into_main_grad = weight, plan.into_main_grad
        log_probs = scatter(log_probs, plan.rows, plan.tokens)
        entropy = scatter(bonus.entropy, plan.rows, plan.tokens) if plan.entropy else vector.new_empty(0)
        ctx.mark_non_differentiable(vector, log_probs, entropy)
        return bonus.subtracted_from(vector[0]).to(head.dtype), vector, log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if ctx.gradients is None:
            raise RuntimeError("fused_linear_ctpo keeps its gradients for one backward pass: call it again")
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        if d_hidden is not None:
            # A 0-d factor would be rounded to the dtype of d_hidden first; one of its rank is not.
            d_hidden.mul_(upstream.reshape(1, 1))
        if d_weight is None:
            return d_hidden, None, None
        if not ctx.into_main_grad:
            return d_hidden, d_weight.mul_(upstream).to(ctx.weight.dtype), None
        _require_one(upstream)
        return d_hidden, _placeholder(ctx.weight), None


Accumulate = Callable[[Tensor, int, Tensor], None] | None


def _once(head: LinearHead, plan: _Plan, bonus: EntropyBonus, accumulate: Accumulate) -> tuple[Tensor, Tensor]:
    """Log-probs `[M]` and the statistics vector; logits of every chunk are computed once."""
    implementation = loss_implementation(plan.batch.log_probs)
    totals = implementation.segment_totals(plan.batch) if plan.spec.per_sequence else None
    state = torch.zeros(plan.batch.segments, 3, dtype=torch.int64, device=plan.batch.cu.device)
    stream = implementation.LossStream(plan.batch, plan.spec, plan.inverse, totals=totals, state=state)
    for start, end in head.chunks():
        merged = head.log_probs(start, end, entropy=plan.entropy)
        g = stream.step(start, end, merged.log_probs)
        plan.batch.log_probs[start:end] = merged.log_probs
        extra = bonus.step(start, end, merged.entropy) if plan.entropy else None
        if accumulate is not None:
            accumulate(head.gradient_rows(start, end, merged, g, extra), start, rows_with_gradient(g, extra))
    return plan.batch.log_probs, stream.finish()


def _twice(head: LinearHead, plan: _Plan, bonus: EntropyBonus, accumulate: Accumulate) -> tuple[Tensor, Tensor]:
    """The same when the ratio needs all log-probs first."""
    lse = torch.empty_like(plan.batch.log_probs)
    for start, end in head.chunks():
        merged = head.log_probs(start, end, entropy=plan.entropy)
        plan.batch.log_probs[start:end], lse[start:end] = merged.log_probs, merged.lse
        if plan.entropy:
            bonus.step(start, end, merged.entropy)
    out = whole_pass(plan.batch, plan.spec, plan.inverse, plan.cp_group)
    if accumulate is not None:
        for start, end in head.chunks():
            g, extra = out.gradient[start:end], bonus.gradient(start, end)
            dz = head.recomputed_gradient_rows(start, end, lse[start:end], g, extra)
            accumulate(dz, start, rows_with_gradient(g, extra))
    return plan.batch.log_probs, out.vector


def _require_one(upstream: Tensor) -> None:
    """The weight gradient is in main_grad already and can no longer be scaled."""
    if upstream.is_cuda:
        torch._assert_async(upstream == 1)
    elif float(upstream) != 1.0:
        raise RuntimeError(
            f"accumulate_into_main_grad needs an upstream gradient of 1; got {float(upstream)}. Scale the advantages "
            "or the denominators instead, or set accumulate_into_main_grad=False"
        )


def _main_grad(weight: Any) -> Tensor:
    """Megatron's attribute of a parameter, of which torch's types know nothing."""
    main_grad: Tensor = weight.main_grad
    return main_grad


def _placeholder(weight: Any) -> Tensor:
    """What autograd gets for a gradient that is in main_grad: megatron's hook must run and must not add it again."""
    weight.grad_added_to_main_grad = True
    # A weight that the embedding shares gets this added to the embedding's gradient: it must be zero then.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
