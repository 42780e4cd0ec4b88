"""The four functions as `torch.library` operators, for torch.compile, torch.export and FakeTensor.

Eager calls do not use them. An operator may neither return nor change its arguments, so these always return fresh
memory. Process groups are passed by name ("" for none), and a size that was not given is 0.
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
from ctpo_kernels import linear, logprob
from ctpo_kernels.linear_head import HeadOptions
from ctpo_kernels.operands import accumulation_dtype, active_rows, pick, scatter

MaybeGroup = dist.ProcessGroup | None
HEAD = "str tp_group, float temperature, SymInt vocab_size, float softcap"
LINEAR = f"{HEAD}, SymInt chunk_size, ScalarType product_dtype, bool sequence_parallel"


def name_of(group: MaybeGroup) -> str:
    return "" if group is None else str(group.group_name)


def group_of(name: str) -> MaybeGroup:
    return c10d._resolve_process_group(name) if name else None  # type: ignore[arg-type]  # a NewType, in newer torch


def fresh(*values: Tensor) -> tuple[Tensor, ...]:
    """Dense tensors that share no memory."""
    return tuple(value.clone(memory_format=torch.contiguous_format) for value in values)


def operator(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    return torch.library.custom_op(f"ctpo_kernels::{name}", mutates_args=(), schema=schema)


# Log-probs of logits


@operator("log_probs", f"(Tensor logits, Tensor labels, {HEAD}, bool entropy) -> (Tensor, Tensor, Tensor)")
def log_probs(
    logits: Tensor, labels: Tensor, tp_group: str, temperature: float, vocab_size: int, softcap: float, entropy: bool
) -> tuple[Tensor, ...]:
    group, size = group_of(tp_group), vocab_size or None
    shard = arguments.shard_of(logits.shape[1], size, group)
    arguments.check_range(labels, size or logits.shape[1] * (group.size() if group else 1))
    found = logprob.forward_pass(logits, labels, group, shard, temperature, softcap=softcap, entropy=entropy)
    return fresh(found.log_probs, found.entropy, found.lse)


@log_probs.register_fake
def _(logits: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(logits.new_empty(labels.shape, dtype=accumulation_dtype(logits)) for _ in range(3))


@operator(
    "log_probs_backward",
    f"(Tensor logits, Tensor labels, Tensor lse, Tensor value, Tensor g, Tensor? of_entropy, {HEAD}) -> Tensor",
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
    shard = arguments.shard_of(logits.shape[1], vocab_size or None, group_of(tp_group))
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
    group: MaybeGroup,
    shape: torch.Size,
    temperature: float,
    vocab_size: int | None,
    softcap: float,
    return_entropy: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs` of rows `[N, V]`."""
    found = log_probs(logits, labels, name_of(group), temperature, vocab_size or 0, softcap, return_entropy)
    return (found[0].view(shape), found[1].view(shape)) if return_entropy else found[0].view(shape)


# Log-probs of hidden states


def options_of(
    tp_group: str, temperature: float, vocab_size: int, softcap: float, chunk_size: int, product_dtype: torch.dtype
) -> HeadOptions:
    """The inverse of `flat_options`."""
    sizes = vocab_size or None, chunk_size or None
    return HeadOptions(group_of(tp_group), temperature, *sizes, product_dtype, softcap)


def flat_options(head: HeadOptions) -> tuple[Any, ...]:
    """The arguments of LINEAR but the last; a schema has no None for sizes, so it is 0."""
    sizes = head.vocab_size or 0, head.chunk_size or 0
    return name_of(head.group), head.temperature, sizes[0], head.softcap, sizes[1], head.product_dtype


@operator(
    "linear_log_probs",
    f"(Tensor hidden, Tensor weight, Tensor labels, Tensor? mask, {LINEAR}, bool entropy) -> (Tensor, Tensor, Tensor)",
)
def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    *head, sequence_parallel, entropy = options
    choices = options_of(*head)
    rows = None if mask is None else active_rows(mask != 0)
    chosen, group = pick(labels, rows), choices.group
    arguments.check_range(chosen, choices.vocab_size or weight.shape[0] * (group.size() if group else 1))
    found = linear.forward_pass(hidden, weight, chosen, rows, sequence_parallel, entropy, choices)
    values, lse, entropies = (scatter(part, rows, labels.numel()) for part in found)
    return fresh(values, entropies, lse)


@linear_log_probs.register_fake
def _(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(hidden.new_empty(labels.shape, dtype=accumulation_dtype(hidden)) for _ in range(3))


@operator(
    "linear_log_probs_backward",
    "(Tensor hidden, Tensor weight, Tensor labels, Tensor? mask, Tensor lse, Tensor value, Tensor g, "
    f"Tensor? of_entropy, {LINEAR}, bool want_hidden, bool want_weight) -> (Tensor, Tensor)",
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
    rest = (labels.numel(), sequence_parallel, options_of(*head), wanted)
    found = linear.backward_pass(hidden, weight, *own, *rest)
    return dense_gradients(hidden, *found)


@linear_log_probs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return gradients_like(hidden, weight, weight.dtype, *rest[-2:])


def dense_gradients(hidden: Tensor, *found: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous gradients, empty for None. Not copied: a copy would double the peak memory of a call."""
    return tuple(hidden.new_empty(0) if gradient is None else gradient.contiguous() for gradient in found)


def gradients_like(
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
    return *(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), *[None] * 10


linear_log_probs.register_autograd(_linear_gradient, setup_context=_keep_linear)


def compiled_linear(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    sequence_parallel: bool,
    return_entropy: bool,
    head: HeadOptions,
) -> Tensor | tuple[Tensor, Tensor]:
    """`linear_log_probs` of rows `[N, H]`."""
    found = linear_log_probs(hidden, weight, labels, mask, *flat_options(head), sequence_parallel, return_entropy)
    return (found[0].view(shape), found[1].view(shape)) if return_entropy else found[0].view(shape)
