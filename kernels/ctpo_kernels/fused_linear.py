"""Output layer, log-probs, loss and all gradients in one sweep over the tokens, without the logits of all of them.

The cumulative ratio of a token depends only on tokens up to it. So everything that its gradient needs is known while
the logits of its chunk are in memory: three matrix products in all, none repeated in a backward pass. Ratios of the
whole sequence depend on later tokens, so their logits are computed twice (four products).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import labels as arguments
from ctpo_kernels.linear_head import HeadOptions
from ctpo_kernels.loss import prepare
from ctpo_kernels.operands import accumulation_dtype, check_operands, product_dtype
from ctpo_kernels.packed import LossTensors
from ctpo_kernels.spec import LossSpec
from ctpo_kernels.stats import CTPOStats
from ctpo_kernels.sweep import SweepPlan, sweep


def fused_linear_ctpo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    response_mask: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
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
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    accumulate_into_main_grad: bool = False,
    gradient_scale: float = 1.0,
    skip_zero_tiles: bool = True,
    return_entropy: bool = False,
    rows: Tensor | None = None,
    may_learn: Tensor | None = None,
) -> tuple[Tensor, CTPOStats, Tensor] | tuple[Tensor, CTPOStats, Tensor, Tensor]:
    """`ctpo_loss(linear_log_probs(hidden, weight, labels), ...)` with its gradients, computed in the forward pass.

    hidden, weight, labels, temperature, vocab_size, tp_group, sequence_parallel, chunk_size: as `linear_log_probs`.
        Row i of hidden predicts labels[i]; all per-token tensors are aligned with labels. All others: as `ctpo_loss`;
        old_log_probs None means on-policy. Rows whose response_mask is 0 are dropped before the first matrix product.
    entropy_coef: subtract this times the entropy of the loss tokens, aggregated like the loss, without `weights`. It
        needs no further matrix product, and the statistics cover the policy loss alone.
    accumulate_into_main_grad: add the weight gradient (float32) to `weight.main_grad` in the forward pass, as
        megatron-core's fused layers do in the backward pass: sets `weight.grad_added_to_main_grad` and returns a
        placeholder to autograd. The upstream scalar must then be `gradient_scale` (checked in the backward pass, on
        CUDA by a device-side assertion).
    gradient_scale: the upstream scalar that the backward pass will get, such as a loss scale. Gradients are multiplied
        by it in float32, before they are rounded to the dtype of the operands. The small ones of a mean over many
        tokens would be 0 in float16. The loss itself is not.
    skip_zero_tiles: skip tiles of 128 rows without any gradient in the two gradient products: rows outside of the loss,
        or with advantage or weight 0. Also clipped rows: on a GPU only for ratios of the whole sequence and with
        `cp_group`, as in a single sweep it would wait for each chunk. Exact; one small read-back per call.
    rows: int64 `[M]`, ascending, the rows where response_mask is not 0, if the caller knows them.
    may_learn: bool `[M]` in host memory, which of `rows` may have a gradient, if the caller knows: tiles are then
        planned without a read-back. Such rows are in the loss, with advantage and weight not 0 unless there is an
        `entropy_coef`.

    Returns the loss (differentiable in hidden and weight), its statistics, and the log-probs; with `return_entropy`
        also the entropies. Both are float32 `[N]`, detached, and 0 where the response mask is 0. One backward per
        forward: a second one raises RuntimeError. Without grad mode only the log-probs and the loss are computed. On
        CUDA it synchronises once for the number of rows and once for the tiles, unless `rows` and `may_learn` are
        given.
    """
    tensors = LossTensors(
        old_log_probs, response_mask, advantages, cu_seqlens, loss_mask, weights, batch_num_tokens, global_batch_size
    )
    spec = LossSpec(clip_low, clip_high, clip_c, clip_power, clip_mode, ratio_mode, loss_agg_mode, loss_scale_factor)
    cp_group, group = arguments.effective(cp_group), arguments.effective(tp_group)
    labels = check_operands(hidden, weight, labels, group, sequence_parallel, temperature)
    if not 0 < gradient_scale < math.inf:
        raise ValueError(f"gradient_scale: must be a positive, finite number; got {gradient_scale}")
    if accumulate_into_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("accumulate_into_main_grad: weight has no main_grad (megatron's DDP makes it)")
    head = HeadOptions(
        group,
        temperature,
        vocab_size,
        chunk_size,
        product_dtype(hidden, weight),
        entropy_gradient=entropy_coef != 0,
    )
    # The sweep fills in the log-probs chunk by chunk.
    log_probs = torch.zeros(labels.shape, dtype=accumulation_dtype(hidden), device=hidden.device)
    plan = SweepPlan.of(
        prepare(log_probs, tensors, spec, cp_group),
        labels,
        cp_group,
        rows,
        sequence_parallel=sequence_parallel,
        skip=skip_zero_tiles,
        may_learn=may_learn,
        entropy_coef=entropy_coef,
        entropy=return_entropy or entropy_coef != 0,
        gradient_scale=gradient_scale,
        head=head,
    )
    plan.check_values(weight)
    loss, vector, log_probs, entropy = _Sweep.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        hidden, weight, plan, torch.is_grad_enabled(), accumulate_into_main_grad
    )
    found = (loss, CTPOStats.from_vector(vector), log_probs)
    return (*found, entropy) if return_entropy else found


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, plan: SweepPlan, differentiate: bool, into_main_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Without grad mode `needs_input_grad` is still set for leaves.
        want_hidden, want_weight = (needed and differentiate for needed in ctx.needs_input_grad[:2])
        d_weight = None
        if want_weight:
            dtype = accumulation_dtype(hidden)
            d_weight = _main_grad(weight) if into_main_grad else torch.zeros_like(weight, dtype=dtype)
        found = sweep(hidden, weight, plan, want_hidden=want_hidden, d_weight=d_weight)
        ctx.gradients = (found.d_hidden, found.d_weight)
        ctx.weight, ctx.into_main_grad, ctx.scale = weight, into_main_grad, plan.gradient_scale
        ctx.mark_non_differentiable(found.vector, found.log_probs, found.entropy)
        return found.loss, found.vector, found.log_probs, found.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("fused_linear_ctpo keeps its gradients for one backward pass: call it again")
        (d_hidden, d_weight), ctx.gradients = ctx.gradients, None
        left = upstream / ctx.scale
        if d_hidden is not None:
            # A 0-d factor would first be rounded to the dtype of d_hidden; a factor of the same rank is not.
            d_hidden.mul_(left.reshape(1, 1))
        if d_weight is None:
            return d_hidden, None, None, None, None
        if not ctx.into_main_grad:
            return d_hidden, d_weight.mul_(left).to(ctx.weight.dtype), None, None, None
        _require(upstream, ctx.scale)
        return d_hidden, _placeholder(ctx.weight), None, None, None


def _require(upstream: Tensor, scale: float) -> None:
    """The weight gradient is in main_grad already and can no longer be scaled."""
    if upstream.is_cuda:
        torch._assert_async(upstream == scale)
    elif float(upstream) != scale:
        raise RuntimeError(
            f"accumulate_into_main_grad needs an upstream gradient of {scale:g}; got {float(upstream)}. Give it as "
            "gradient_scale, scale the advantages or the denominators instead, or set accumulate_into_main_grad=False"
        )


def _main_grad(weight: Any) -> Tensor:
    """Megatron's gradient buffer of a parameter; torch's type stubs do not have the attribute."""
    main_grad: Tensor = weight.main_grad
    return main_grad


def _placeholder(weight: Any) -> Tensor:
    """What autograd receives when the gradient is already in main_grad: Megatron's hook must run, but not add it."""
    weight.grad_added_to_main_grad = True
    # For a weight tied to the embedding, this is added to the embedding's gradient, so it must be zero.
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
