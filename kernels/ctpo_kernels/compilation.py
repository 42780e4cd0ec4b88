"""Compiles the kernels of a training run before its first step, by making its calls on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import dispatch
from ctpo_kernels.fused_linear import fused_linear_ctpo
from ctpo_kernels.linear import linear_log_probs
from ctpo_kernels.logprob import vocab_parallel_log_probs
from ctpo_kernels.loss import ctpo_loss
from ctpo_kernels.packed import LossTensors

_WIDTH = 16
"""Of the hidden states: kernels do not see it, only cuBLAS does."""


def warm_up(
    columns: int,
    dtype: torch.dtype = torch.bfloat16,
    batches: Sequence[LossTensors] = (),
    *,
    device: torch.device | str = "cuda",
    functions: Sequence[Callable[..., Any]] = (linear_log_probs, fused_linear_ctpo),
    loss: Mapping[str, Any] = MappingProxyType({}),
    entropy_coef: float = 0.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    return_entropy: bool = False,
    return_per_token: bool = False,
) -> None:
    """Compile every Triton kernel that later calls will launch; returns when the device has run each of them once.

    Triton compiles a kernel at its first launch, seconds for each, while other ranks wait in a collective. What it
    compiles depends on dtypes, on the columns, and on which tensors are given; not on numbers of tokens, sequences or
    rows, nor on the hidden size. Nothing is compiled, and nothing called, where the torch backend runs.

    columns: of this rank's shard of the vocabulary: rows of the weight, last size of the logits.
    dtype: of hidden states and weight (of two, the lower precision); for `vocab_parallel_log_probs`, of the logits.
    batches: small examples of what the run will pass to `ctpo_loss` besides log-probs. As in the run: dtypes, what is
        None, values per token or per sequence, counts as numbers or tensors. Default: a packed batch
        with `old_log_probs`, one advantage per sequence, and a bool mask.
    device: of the default batch.
    functions: those that the run calls, of the four.
    loss: keywords of `ctpo_loss` that say which loss it is (`ratio_mode`, `clip_power`, `loss_agg_mode`, ...).
    entropy_coef, vocab_size, tp_group, cp_group, return_per_token: as the functions take them. Collective in
        both groups.
    return_entropy: calls with entropies follow, too, besides those without.

    Raises ValueError for a function that is none of the four, otherwise as the functions do.
    """
    known = (ctpo_loss, vocab_parallel_log_probs, linear_log_probs, fused_linear_ctpo)
    if unknown := [function for function in functions if function not in known]:
        names = ", ".join(function.__name__ for function in known)
        raise ValueError(f"functions: expected some of {names}; got {unknown[0]!r}")
    head: dict[str, Any] = {"tp_group": tp_group, "vocab_size": vocab_size}
    of_loss = {**loss, "cp_group": cp_group}
    # No tile is skipped: the kernels of the gradient run whatever the advantages are.
    of_sweep = of_loss | {"entropy_coef": entropy_coef, "skip_zero_tiles": False}
    for batch in batches or (_example(torch.device(device)),):
        mask, given = batch.response_mask, batch._asdict()
        if dispatch.choose(mask.new_empty(0, dtype=dtype)) == "torch":
            continue
        with torch.enable_grad():
            for entropy in (False, True) if return_entropy else (False,):
                operands, options = _operands(mask, columns, dtype), head | {"return_entropy": entropy}
                if linear_log_probs in functions:
                    _backward(linear_log_probs(**operands, mask=mask, **options))
                if vocab_parallel_log_probs in functions:
                    logits = mask.new_zeros(*mask.shape, columns, dtype=dtype).requires_grad_()
                    _backward(vocab_parallel_log_probs(logits, operands["labels"], **options))
                if fused_linear_ctpo in functions:
                    fused_linear_ctpo(**operands, **given, **of_sweep, **options)[0].backward()
            if ctpo_loss in functions:
                log_probs = mask.new_zeros(mask.shape, dtype=torch.float32).requires_grad_()
                ctpo_loss(log_probs, **given, **of_loss, return_per_token=return_per_token)[0].backward()
        if mask.is_cuda:
            torch.cuda.synchronize(mask.device)


def _example(device: torch.device) -> LossTensors:
    """Two packed sequences, of which the first tokens are a prompt."""
    mask = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool, device=device)
    boundaries = torch.tensor([0, 4, 8], device=device)
    return LossTensors(torch.zeros(8, device=device), mask, torch.ones(2, device=device), boundaries)


def _operands(mask: Tensor, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Hidden states, weight and labels of the tokens of a mask, all 0, as the functions take them."""
    hidden = mask.new_zeros(*mask.shape, _WIDTH, dtype=dtype).requires_grad_()
    weight = mask.new_zeros(columns, _WIDTH, dtype=dtype).requires_grad_()
    return {"hidden": hidden, "weight": weight, "labels": mask.new_zeros(mask.shape, dtype=torch.int64)}


def _backward(found: Tensor | tuple[Tensor, Tensor]) -> None:
    """A gradient of every result."""
    results = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(results, [torch.ones_like(values) for values in results])
