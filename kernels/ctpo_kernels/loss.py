"""The CTPO loss of given log-probs: one pass for loss, gradient and statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import context_parallel, dispatch, loss_torch
from ctpo_kernels.labels import effective
from ctpo_kernels.loss_torch import LossPass, TorchLossStream
from ctpo_kernels.packed import LossTensors, PackedTokens
from ctpo_kernels.spec import LossSpec
from ctpo_kernels.stats import CTPOStats, PerToken

if TYPE_CHECKING:
    from ctpo_kernels.loss_triton import TritonLossStream


def ctpo_loss(
    log_probs: Tensor,
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
    cp_group: dist.ProcessGroup | None = None,
    return_per_token: bool = False,
) -> tuple[Tensor, CTPOStats] | tuple[Tensor, CTPOStats, PerToken]:
    """Policy-gradient loss of packed sequences: CTPO (arXiv 2605.07331) and related objectives.

    log_probs: float32 `[N]` nats, the only differentiable input (float64 too, in the torch backend).
    old_log_probs: `[N]`, log-probs the ratio is taken against; None: on-policy (every ratio 1).
    response_mask: `[N]`, 1 where the policy sampled the token (the model mask): only these enter the prefix sum and
        advance the position.
    advantages: `[N]` or `[1, N]`, one value per token, or `[B]` or `[B, 1]`, one per sequence. With N == B > 1 a flat
        tensor is ambiguous and is refused. weights: the same shapes, detached factors of the token loss (default 1).
    cu_seqlens: integers `[B + 1]` rising from 0; tokens behind the last boundary are padding. On a GPU they are not
        read back: wrong ones make the loss and the gradient NaN.
    clip_low, clip_high, clip_c: bounds of log r_t, times t^clip_power ("log_power"). Or bounds of r_t itself ("ratio":
        1 - low, 1 + high, c). clip_c bounds the ratio from above at negative advantages; None or negative: off. With
        "detached_ratio" the bounded r_t is a constant factor of log p_t (CISPO): -A sg[clamp(r_t, 1 - low, 1 + high)]
        log p_t. No bound or cap ends its gradient, and clip_c must be off.
    ratio_mode: log r_t is the prefix sum S_t ("cumprod", CTPO), S_t / t ("geomean"), the token's own d_t ("token"),
        the sum over the sequence ("sequence") or its mean ("sequence-geomean", GSPO).
    loss_mask: `[N]`, tokens whose loss counts (default and at most response_mask); it affects the loss alone.
    loss_agg_mode: "seq-mean-token-mean", "token-mean", "seq-mean-token-sum" (divided by `loss_scale_factor` too).
    batch_num_tokens, global_batch_size: loss tokens and sequences of the whole optimizer step (default: of this call),
        so that the losses of its micro-batches add up.
    cp_group: context-parallel group in which this rank holds the pieces r and 2R - 1 - r of 2R of every sequence, one
        after the other (`cu_seqlens` is local). Loss and statistics are this rank's share.
    return_per_token: also return `PerToken`.

    The gradient reaches each token's own log-prob only. S_t has the same bits for every span, block size, packing order
    and context-parallel split. Values at masked tokens have no effect; a NaN at a response token propagates to the rest
    of its own sequence. No host synchronisation where `cu_seqlens` and the data are on one device.
    Raises ValueError or TypeError naming the argument, RuntimeError when a requested backend cannot run.
    """
    tensors = LossTensors(
        old_log_probs, response_mask, advantages, cu_seqlens, loss_mask, weights, batch_num_tokens, global_batch_size
    )
    spec = LossSpec(clip_low, clip_high, clip_c, clip_power, clip_mode, ratio_mode, loss_agg_mode, loss_scale_factor)
    group = effective(cp_group)
    prepared = prepare(log_probs, tensors, spec, group)
    loss, out = _Loss.apply(  # type: ignore[no-untyped-call]  # torch does not type `apply`
        log_probs, lambda: whole_pass(*prepared, group, per_token=return_per_token)
    )
    stats = CTPOStats.from_vector(out.vector)
    return (loss, stats, out.per_token) if return_per_token else (loss, stats)


class PreparedLoss(NamedTuple):
    """A checked call. batch: with a context-parallel group its segments are `context_parallel.pieces`.

    inverse: `LossSpec.inverse_denominator`.
    """

    batch: PackedTokens
    spec: LossSpec
    inverse: float | Tensor | None


def prepare(
    log_probs: Tensor, tensors: LossTensors, spec: LossSpec, cp_group: dist.ProcessGroup | None
) -> PreparedLoss:
    """Check the arguments of a call and pack its tokens; raises as `ctpo_loss`."""
    spec.check()
    batch = PackedTokens.of(log_probs, tensors)
    spec.require_global_counts(cp_group, tensors.batch_num_tokens)
    # Sequences are counted before context parallelism cuts each of them into two segments.
    inverse = spec.inverse_denominator(tensors.batch_num_tokens, tensors.global_batch_size, batch)
    return PreparedLoss(batch if cp_group is None else context_parallel.pieces(batch), spec, inverse)


def whole_pass(
    batch: PackedTokens,
    spec: LossSpec,
    inverse: float | Tensor | None,
    cp_group: dist.ProcessGroup | None,
    *,
    per_token: bool = False,
) -> LossPass:
    """Loss and gradient of a batch whose log-probs are all known, by the backend of its device.

    With `cp_group` the segments are `context_parallel.pieces`.
    """
    implementation = loss_implementation(batch.log_probs)
    state = totals = positions = None
    if cp_group is not None:
        state, totals = context_parallel.zigzag(implementation.segment_totals(batch), cp_group)
        positions = cp_group.size() * batch.tokens
    carried = {"state": state, "totals": totals, "positions": positions}
    out: LossPass = implementation.loss_pass(batch, spec, inverse, per_token=per_token, **carried)
    return out


def loss_implementation(tensor: Tensor) -> Any:
    """Return the module with `loss_pass` and `segment_totals` for this tensor."""
    if dispatch.choose(tensor) == "torch":
        return loss_torch
    from ctpo_kernels import loss_triton

    return loss_triton


def loss_stream(
    batch: PackedTokens, spec: LossSpec, inverse: float | Tensor, *, totals: Tensor | None, state: Tensor
) -> TorchLossStream | TritonLossStream:
    """Return the loss of `batch` window by window, by the backend of its device; arguments as `TorchLossStream`."""
    if dispatch.choose(batch.log_probs) == "torch":
        return TorchLossStream(batch, spec, inverse, totals=totals, state=state)
    from ctpo_kernels.loss_triton import TritonLossStream

    return TritonLossStream(batch, spec, inverse, totals=totals, state=state)


class _Loss(torch.autograd.Function):
    """A loss whose gradient comes with it: backward only multiplies it by the upstream scalar."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, compute: Callable[[], LossPass]) -> tuple[Tensor, LossPass]:
        out = compute()
        ctx.save_for_backward(out.gradient)
        return out.loss, out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: None) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None
