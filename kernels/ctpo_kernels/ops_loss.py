"""The loss and the sweep as `torch.library` operators; see `ops`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctpo_kernels import loss
from ctpo_kernels.linear_head import HeadOptions
from ctpo_kernels.operands import accumulation_dtype
from ctpo_kernels.ops import (
    LINEAR,
    MaybeGroup,
    dense_gradients,
    flat_options,
    fresh,
    gradients_like,
    group_of,
    name_of,
    operator,
    options_of,
)
from ctpo_kernels.packed import LossTensors
from ctpo_kernels.spec import LossSpec
from ctpo_kernels.stats import MAXIMA, SUMS, CTPOStats, PerToken
from ctpo_kernels.sweep import SweepPlan, sweep

_TOKENS = "Tensor? old, Tensor response_mask, Tensor advantages, Tensor? cu_seqlens, Tensor? loss_mask, Tensor? weights"
_COUNTS = "SymInt? batch_tokens, Tensor? batch_tokens_tensor, SymInt? batch_size, Tensor? batch_size_tensor"
_KEYWORDS = (
    "float clip_low, float clip_high, float? clip_c, float clip_power, str clip_mode, str ratio_mode, "
    "str loss_agg_mode, float loss_scale_factor"
)


def _flattened(tensors: LossTensors, spec: LossSpec) -> tuple[Any, ...]:
    """The arguments of _TOKENS, _COUNTS and _KEYWORDS in their order; `_prepared` is the inverse."""
    *tokens, batch_tokens, batch_size = tensors
    return *tokens, *_number_and_tensor(batch_tokens), *_number_and_tensor(batch_size), *spec


def _number_and_tensor(count: int | Tensor | None) -> tuple[int | None, Tensor | None]:
    """A schema has no type for "a number or a tensor": each count is two arguments, at least one of them None."""
    return (None, count) if isinstance(count, Tensor) else (count, None)


# The loss of log-probs


@operator(
    "loss",
    f"(Tensor log_probs, {_TOKENS}, {_COUNTS}, {_KEYWORDS}, str cp_group, bool per_token) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def loss_operator(values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *_, cp_name, per_token = given
    cp_group = group_of(cp_name)
    out = loss.whole_pass(*_prepared(values, given, cp_group), cp_group, per_token=per_token)
    details = out.per_token
    found = (details.loss, details.log_ratio, details.prefix, details.clip) if details else [values.new_empty(0)] * 4
    return fresh(out.loss, out.vector, out.gradient.view(values.shape), *found)


@loss_operator.register_fake
def _(values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    vector = values.new_empty(len(SUMS) + len(MAXIMA), dtype=torch.float64)
    dtypes = (values.dtype, values.dtype, torch.int64, torch.int8)
    n = values.numel()
    details = (values.new_empty(n, dtype=dtype) if given[-1] else values.new_empty(0) for dtype in dtypes)
    return values.new_empty(()), vector, values.new_empty(values.shape), *details


def _prepared(log_probs: Tensor, given: tuple[Any, ...], cp_group: MaybeGroup) -> loss.PreparedLoss:
    """From arguments in the order of _TOKENS, _COUNTS, _KEYWORDS."""
    tokens, tokens_tensor, size, size_tensor = given[6:10]
    counts = (tokens if tokens_tensor is None else tokens_tensor, size if size_tensor is None else size_tensor)
    tensors = LossTensors._make((*given[:6], *counts))
    return loss.prepare(log_probs, tensors, LossSpec(*given[10:18]), cp_group)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])


def _loss_gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    return ctx.saved_tensors[0] * upstream, *[None] * 20


loss_operator.register_autograd(_loss_gradient, setup_context=_keep_gradient)


def compiled_loss(
    log_probs: Tensor, tensors: LossTensors, spec: LossSpec, cp_group: MaybeGroup, per_token: bool
) -> tuple[Tensor, CTPOStats] | tuple[Tensor, CTPOStats, PerToken]:
    """`loss.ctpo_loss` in a traced call."""
    value, vector, _, *details = loss_operator(log_probs, *_flattened(tensors, spec), name_of(cp_group), per_token)
    stats = CTPOStats.from_vector(vector.detach())
    if not per_token:
        return value, stats
    return value, stats, PerToken(*(part.detach().view(log_probs.shape) for part in details))


# The sweep


@operator(
    "fused_linear",
    f"(Tensor hidden, Tensor weight, Tensor labels, {_TOKENS}, {_COUNTS}, {_KEYWORDS}, {LINEAR}, str cp_group, "
    "bool skip, bool skip_clipped, float entropy_coef, bool entropy, bool want_hidden, bool want_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def fused_linear(hidden: Tensor, weight: Tensor, labels: Tensor, *given: Any) -> tuple[Tensor, ...]:
    head, rest = given[18:24], given[24:]
    sequence_parallel, cp_name, skip, skip_clipped, entropy_coef, entropy, want_hidden, want_weight = rest
    cp_group = group_of(cp_name)
    dtype = accumulation_dtype(hidden)
    log_probs = torch.zeros(given[1].shape, dtype=dtype, device=hidden.device)  # as the response mask
    plan = SweepPlan.of(
        _prepared(log_probs, given, cp_group),
        labels,
        cp_group,
        sequence_parallel=sequence_parallel,
        skip=skip,
        skip_clipped=skip_clipped,
        may_learn=None,
        entropy_coef=entropy_coef,
        entropy=entropy or entropy_coef != 0,
        head=options_of(*head)._replace(entropy_gradient=entropy_coef != 0),
    )
    plan.check_values(weight)
    d_weight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    found = sweep(hidden, weight, plan, want_hidden=want_hidden, d_weight=d_weight)
    entropies = found.entropy if entropy else found.log_probs.new_empty(0)
    gradients = dense_gradients(hidden, found.d_hidden, found.d_weight)
    return *fresh(found.loss, found.vector, found.log_probs, entropies), *gradients


@fused_linear.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *given: Any) -> tuple[Tensor, ...]:
    entropy, *wanted = given[-3:]
    dtype = accumulation_dtype(hidden)
    vector = hidden.new_empty(len(SUMS) + len(MAXIMA), dtype=torch.float64)
    values = hidden.new_empty(labels.shape, dtype=dtype)
    entropies = hidden.new_empty(labels.shape if entropy else (0,), dtype=dtype)
    return (
        hidden.new_empty((), dtype=dtype),
        vector,
        values,
        entropies,
        *gradients_like(hidden, weight, dtype, *wanted),
    )


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[-2:])
    ctx.dtypes, ctx.wanted, ctx.others = (inputs[0].dtype, inputs[1].dtype), inputs[-2:], len(inputs) - 2


def _fused_gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    factor = upstream.reshape(1, 1)
    parts = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    return *((part * factor).to(dtype) if want else None for part, dtype, want in parts), *[None] * ctx.others


fused_linear.register_autograd(_fused_gradient, setup_context=_keep_gradients)


def compiled_fused(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tensors: LossTensors,
    spec: LossSpec,
    head: HeadOptions,
    options: tuple[Any, ...],
    shape: torch.Size,
) -> tuple[Tensor, CTPOStats, Tensor] | tuple[Tensor, CTPOStats, Tensor, Tensor]:
    """`fused_linear_ctpo` of rows `[N, H]`."""
    cp_group, sequence_parallel, skip, skip_clipped, entropy_coef, entropy = options
    wanted = (x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight))
    rest = (sequence_parallel, name_of(cp_group), skip, skip_clipped, entropy_coef, entropy)
    found = fused_linear(hidden, weight, labels, *_flattened(tensors, spec), *flat_options(head), *rest, *wanted)
    value, vector, log_probs, entropies = found[0], *(part.detach() for part in found[1:4])
    out = (value, CTPOStats.from_vector(vector), log_probs.view(shape))
    return (*out, entropies.view(shape)) if entropy else out
