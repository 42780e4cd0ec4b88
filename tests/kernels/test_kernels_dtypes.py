"""Operands of two dtypes: what is multiplied in which precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import fused_linear_ctpo, linear_log_probs
from tests.kernels.heads import Head, eager, random_head, sweep
from tests.kernels.packings import distance, same_bits

LOW = torch.bfloat16


def mixed(hidden: torch.dtype, weight: torch.dtype) -> Head:
    """Numbers of bfloat16 in these dtypes."""
    head = random_head(21, [20, 11], width=6, vocab=13, dtype=LOW)
    return Head(head.hidden.to(hidden), head.weight.to(weight), head.labels, head.batch)


def log_probs_of(head: Head, **keywords: Any) -> Tensor:
    mask = head.batch["response_mask"]
    found: Tensor = linear_log_probs(head.hidden, head.weight, head.labels, mask=mask, chunk_size=16, **keywords)
    return found


@pytest.mark.parametrize(
    "dtypes", [(LOW, torch.float32), (torch.float32, LOW), (torch.float32, torch.float16)], ids=str
)
def test_two_dtypes_are_multiplied_in_the_lower_one(backend: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Each gradient comes in the dtype of its operand, a float32 one unrounded."""
    head, exact = mixed(*dtypes), eager(mixed(LOW, LOW).double())
    found = sweep(head, chunk_size=16)
    low = min(dtypes, key=lambda dtype: dtype.itemsize)
    plain = mixed(low, low)
    assert same_bits(found.log_probs, sweep(plain, chunk_size=16).log_probs)
    assert same_bits(found.log_probs, log_probs_of(head))
    for name, dtype in zip(("d_hidden", "d_weight"), dtypes, strict=True):
        gradient = getattr(found, name)
        assert gradient.dtype == dtype
        assert distance(gradient, getattr(exact, name)) <= (5e-6 if dtype == torch.float32 else 2**-8)


def test_float32_weight_takes_its_gradient_into_main_grad(backend: str) -> None:
    head = mixed(LOW, torch.float32)
    weight: Any = head.weight.clone().requires_grad_()
    weight.main_grad = torch.ones_like(head.weight)
    loss, *_ = fused_linear_ctpo(**{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True)
    loss.backward()
    assert distance(weight.main_grad - 1.0, sweep(head).d_weight.double()) <= 1e-5
