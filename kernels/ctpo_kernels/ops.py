"""The four functions as `torch.library` operators: what torch.compile, torch.export and FakeTensor see of them.

Eager calls do not come here. An operator may neither return nor change its arguments, so these always return fresh
memory, and process groups travel by name ("" for none). -1 or 0 stand for a size that was not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.library import CustomOpDef

from ctpo_kernels import labels as arguments
from ctpo_kernels import linear, logprob, loss
from ctpo_kernels.operands import accumulation_dtype, active_rows, pick, scatter
from ctpo_kernels.spec import LossKeywords
from ctpo_kernels.stats import MAXIMA, SUMS, CTPOStats, PerToken
from ctpo_kernels.sweep import Plan, Prepared, sweep

Group = dist.ProcessGroup | None
_HEAD = "str tp_group, float temperature, SymInt vocab_size, float softcap"
_LINEAR = f"{_HEAD}, SymInt chunk_size, bool sequence_parallel"
_TOKENS = "Tensor? old, Tensor response_mask, Tensor advantages, Tensor? cu_seqlens, Tensor? loss_mask, Tensor? weights"
_COUNTS = "SymInt? batch_tokens, Tensor? batch_tokens_tensor, SymInt? batch_size, Tensor? batch_size_tensor"
_KEYWORDS = (
    "float clip_low, float clip_high, float? clip_c, float clip_power, str clip_mode, str ratio_mode, "
    "str loss_agg_mode, float loss_scale_factor"
)


def _name(group: Group) -> str:
    return "" if group is None else str(group.group_name)


def _group(name: str) -> Group:
    return c10d._resolve_process_group(name) if name else None  # type: ignore[arg-type]  # a NewType, in newer torch


def _counts(given: tuple[Any, Any]) -> list[Any]:
    """Each count as a number and as a tensor, one of them None."""
    return [part for value in given for part in ((None, value) if isinstance(value, Tensor) else (value, None))]


def _fresh(*values: Tensor) -> tuple[Tensor, ...]:
    """Dense tensors that share no memory."""
    return tuple(value.clone(memory_format=torch.contiguous_format) for value in values)


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    return torch.library.custom_op(f"ctpo_kernels::{name}", mutates_args=(), schema=schema)


# Log-probs of logits


@_operator("log_probs", f"(Tensor logits, Tensor labels, {_HEAD}, bool entropy) -> (Tensor, Tensor, Tensor)")
def log_probs(
    logits: Tensor, labels: Tensor, tp_group: str, temperature: float, vocab_size: int, softcap: float, entropy: bool
) -> tuple[Tensor, ...]:
    group, size = _group(tp_group), vocab_size or None
    shard = arguments.shard_of(logits.shape[1], size, group)
    arguments.check_range(labels, size or logits.shape[1] * (group.size() if group else 1))
    found = logprob.forward_pass(logits, labels, group, shard, temperature, softcap=softcap, entropy=entropy)
    return _fresh(found.log_probs, found.entropy, found.lse)


@log_probs.register_fake
def _(logits: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(labels.shape, dtype=accumulation_dtype(logits)) for _ in range(3))


@_operator(
    "log_probs_backward",
    f"(Tensor logits, Tensor labels, Tensor lse, Tensor value, Tensor g, Tensor? of_entropy, {_HEAD}) -> Tensor",
)
def log_probs_backward(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    value: Tensor,
    g: Tensor,
    of_entropy: Tensor | None,
    tp_group: str,
    temperature: float,
    vocab_size: int,
    softcap: float,
) -> Tensor:
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    shard = arguments.shard_of(logits.shape[1], vocab_size or None, _group(tp_group))
    logprob.backward_pass(out, logits, labels, lse, value, g, of_entropy, shard, temperature, softcap)
    return out


@log_probs_backward.register_fake
def _(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _keep_log_probs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.options, ctx.entropy = inputs
    ctx.save_for_backward(logits, labels, output[2], output[1])


def _log_probs_gradient(ctx: Any, g: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
    extra = of_entropy if ctx.entropy else None
    return log_probs_backward(*ctx.saved_tensors, g, extra, *ctx.options), *[None] * 6


log_probs.register_autograd(_log_probs_gradient, setup_context=_keep_log_probs)


def compiled_log_probs(
    logits: Tensor,
    labels: Tensor,
    group: Group,
    shape: torch.Size,
    temperature: float,
    vocab_size: int | None,
    softcap: float,
    return_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs` of rows `[N, V]`."""
    found = log_probs(logits, labels, _name(group), temperature, vocab_size or 0, softcap, return_entropy)
    return (found[0].view(shape), found[1].view(shape)) if return_entropy else found[0].view(shape)


# Log-probs of hidden states


def _settings(tp_group: str, temperature: float, vocab_size: int, softcap: float, chunk_size: int) -> dict[str, Any]:
    return {
        "group": _group(tp_group),
        "temperature": temperature,
        "vocab_size": vocab_size or None,
        "chunk_size": chunk_size or None,
        "softcap": softcap,
    }


@_operator(
    "linear_log_probs",
    f"(Tensor hidden, Tensor weight, Tensor labels, Tensor? mask, {_LINEAR}, bool entropy) -> (Tensor, Tensor, Tensor)",
)
def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    *head, sequence_parallel, entropy = options
    settings = _settings(*head)
    rows = None if mask is None else active_rows(mask != 0)
    chosen, group = pick(labels, rows), settings["group"]
    arguments.check_range(chosen, settings["vocab_size"] or weight.shape[0] * (group.size() if group else 1))
    found = linear.forward_pass(hidden, weight, chosen, rows, sequence_parallel, entropy, settings)
    values, lse, entropies = (scatter(part, rows, labels.numel()) for part in found)
    return _fresh(values, entropies, lse)


@linear_log_probs.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(labels.shape, dtype=accumulation_dtype(hidden)) for _ in range(3))


@_operator(
    "linear_log_probs_backward",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? mask, Tensor lse, Tensor value, Tensor g, "
    f"Tensor? of_entropy, {_LINEAR}, bool want_hidden, bool want_weight) -> (Tensor, Tensor)",
)
def linear_log_probs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    value: Tensor,
    g: Tensor,
    of_entropy: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    *head, sequence_parallel, want_hidden, want_weight = options
    rows = None if mask is None else active_rows(mask != 0)
    own = (pick(labels, rows), rows, pick(lse, rows), pick(value, rows), g, of_entropy)
    wanted = (want_hidden, want_weight)
    rest = (labels.numel(), sequence_parallel, _settings(*head), wanted)
    found = linear.backward_pass(hidden, weight, *own, *rest)
    return _fresh(*(hidden.new_empty(0) if gradient is None else gradient for gradient in found))


@linear_log_probs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _gradients_like(hidden, weight, weight.dtype, *rest[-2:])


def _gradients_like(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, want_hidden: bool, want_weight: bool
) -> tuple[Tensor, Tensor]:
    d_hidden = hidden.new_empty(hidden.shape if want_hidden else (0,))
    return d_hidden, weight.new_empty(weight.shape, dtype=dtype) if want_weight else hidden.new_empty(0)


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, mask, *ctx.options, ctx.entropy = inputs
    ctx.save_for_backward(hidden, weight, labels, mask, output[2], output[1])


def _linear_gradient(ctx: Any, g: Tensor, of_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[:2]
    extra = of_entropy if ctx.entropy else None
    found = linear_log_probs_backward(*ctx.saved_tensors, g, extra, *ctx.options, *wanted)
    return *(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), *[None] * 9


linear_log_probs.register_autograd(_linear_gradient, setup_context=_keep_linear)


def compiled_linear(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    sequence_parallel: bool,
    return_entropy: bool,
    head: dict[str, Any],
) -> Tensor | tuple[Tensor, Tensor]:
    """`linear_log_probs` of rows `[N, H]`."""
    found = linear_log_probs(hidden, weight, labels, mask, *_head(head), sequence_parallel, return_entropy)
    return (found[0].view(shape), found[1].view(shape)) if return_entropy else found[0].view(shape)


def _head(head: dict[str, Any]) -> tuple[Any, ...]:
    sizes = head["vocab_size"] or 0, head["chunk_size"] or 0
    return _name(head["group"]), head["temperature"], sizes[0], head["softcap"], sizes[1]


# The loss of log-probs


@_operator(
    "loss",
    f"(Tensor log_probs, {_TOKENS}, {_COUNTS}, {_KEYWORDS}, str cp_group, bool per_token) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def loss_operator(values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *_, cp_name, per_token = given
    cp_group = _group(cp_name)
    out = loss.whole_pass(*_prepared(values, given, cp_group), cp_group, per_token=per_token)
    details = out.per_token
    found = (details.loss, details.log_ratio, details.prefix, details.clip) if details else [values.new_empty(0)] * 4
    return _fresh(out.loss, out.vector, out.gradient.view(values.shape), *found)


@loss_operator.register_fake
def _(values: Tensor, *given: Any) -> tuple[Tensor, ...]:
    vector = values.new_empty(len(SUMS) + len(MAXIMA), dtype=torch.float64)
    dtypes = (values.dtype, values.dtype, torch.int64, torch.int8)
    n = values.numel()
    details = (values.new_empty(n, dtype=dtype) if given[-1] else values.new_empty(0) for dtype in dtypes)
    return values.new_empty(()), vector, values.new_empty(values.shape), *details


def _prepared(log_probs: Tensor, given: tuple[Any, ...], cp_group: Group) -> Prepared:
    """From arguments in the order of _TOKENS, _COUNTS, _KEYWORDS."""
    old, response_mask, advantages, cu_seqlens, loss_mask, weights = given[:6]
    tokens, tokens_tensor, size, size_tensor = given[6:10]
    counts = (tokens if tokens_tensor is None else tokens_tensor, size if size_tensor is None else size_tensor)
    keywords = LossKeywords(*given[10:18])
    masks = (loss_mask, weights, keywords)
    return loss.prepared(log_probs, old, response_mask, advantages, cu_seqlens, *masks, *counts, cp_group)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[2])


def _loss_gradient(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
    return ctx.saved_tensors[0] * upstream, *[None] * 20


loss_operator.register_autograd(_loss_gradient, setup_context=_keep_gradient)


def compiled_loss(
    tokens: tuple[Any, ...], counts: tuple[Any, Any], keywords: tuple[Any, ...], cp_group: Group, per_token: bool
) -> tuple[Tensor, CTPOStats] | tuple[Tensor, CTPOStats, PerToken]:
    """`ctpo_loss`."""
    value, vector, _, *details = loss_operator(*tokens, *_counts(counts), *keywords, _name(cp_group), per_token)
    stats = CTPOStats.from_vector(vector.detach())
    if not per_token:
        return value, stats
    return value, stats, PerToken(*(part.detach().view(tokens[0].shape) for part in details))


# The sweep


@_operator(
    "fused_linear",
    f"(Tensor hidden, Tensor weight, Tensor labels, {_TOKENS}, {_COUNTS}, {_KEYWORDS}, {_LINEAR}, str cp_group, "
    "bool skip, float entropy_coef, bool entropy, bool want_hidden, bool want_weight) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def fused_linear(hidden: Tensor, weight: Tensor, labels: Tensor, *given: Any) -> tuple[Tensor, ...]:
    head, rest = given[18:23], given[23:]
    sequence_parallel, cp_name, skip, entropy_coef, entropy, want_hidden, want_weight = rest
    cp_group = _group(cp_name)
    dtype = accumulation_dtype(hidden)
    log_probs = torch.zeros(given[1].shape, dtype=dtype, device=hidden.device)  # as the response mask
    plan = Plan.of(
        _prepared(log_probs, given, cp_group),
        labels,
        cp_group,
        sequence_parallel=sequence_parallel,
        skip=skip,
        entropy_coef=entropy_coef,
        entropy=entropy or entropy_coef != 0,
        head=_settings(*head) | {"entropy_gradient": entropy_coef != 0},
    )
    plan.check_labels(weight)
    d_weight = torch.zeros_like(weight, dtype=dtype) if want_weight else None
    found = sweep(hidden, weight, plan, want_hidden=want_hidden, d_weight=d_weight)
    gradients = (hidden.new_empty(0) if part is None else part for part in (found.d_hidden, found.d_weight))
    entropies = found.entropy if entropy else found.log_probs.new_empty(0)
    return _fresh(found.loss, found.vector, found.log_probs, entropies, *gradients)


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
        *_gradients_like(hidden, weight, dtype, *wanted),
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
    tokens: tuple[Any, ...],
    counts: tuple[Any, Any],
    keywords: tuple[Any, ...],
    head: dict[str, Any],
    options: tuple[Any, ...],
    shape: torch.Size,
) -> tuple[Tensor, CTPOStats, Tensor] | tuple[Tensor, CTPOStats, Tensor, Tensor]:
    """`fused_linear_ctpo` of rows `[N, H]`."""
    cp_group, sequence_parallel, skip, entropy_coef, entropy = options
    wanted = (x.requires_grad and torch.is_grad_enabled() for x in (hidden, weight))
    loss_arguments = (*tokens, *_counts(counts), *keywords)
    rest = (sequence_parallel, _name(cp_group), skip, entropy_coef, entropy)
    found = fused_linear(hidden, weight, labels, *loss_arguments, *_head(head), *rest, *wanted)
    value, vector, log_probs, entropies = found[0], *(part.detach() for part in found[1:4])
    out = (value, CTPOStats.from_vector(vector), log_probs.view(shape))
    return (*out, entropies.view(shape)) if entropy else out
