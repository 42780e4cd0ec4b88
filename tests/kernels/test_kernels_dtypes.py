"""Operands of two dtypes and torch.autocast: what is multiplied in which precision, and a bias of the output layer."""

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


def test_autocast_chooses_the_precision_as_for_a_linear_layer(backend: str) -> None:
    """Forward under autocast, backward outside of it, where it belongs; sums stay float32, float64 stays float64."""
    head = random_head(22, [20, 11], width=6, vocab=13)
    low = Head(head.hidden.to(LOW), head.weight.to(LOW), head.labels, head.batch)
    operands = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    arguments = head.arguments() | dict(zip(("hidden", "weight"), operands, strict=True))
    with torch.autocast("cpu", dtype=LOW):
        assert torch.nn.functional.linear(head.hidden, head.weight).dtype == LOW
        loss, _, log_probs = fused_linear_ctpo(**arguments, entropy_coef=0.1, chunk_size=16)
        alone = log_probs_of(head)
        double = log_probs_of(head.double()) if backend == "torch" else None
    expected = sweep(low, entropy_coef=0.1, chunk_size=16)
    assert same_bits(log_probs, expected.log_probs) and same_bits(alone, expected.log_probs)
    assert same_bits(loss.detach(), expected.loss)
    assert not same_bits(alone, log_probs_of(head))
    for found, rounded in zip(torch.autograd.grad(loss, operands), (expected.d_hidden, expected.d_weight), strict=True):
        assert found.dtype == torch.float32
        assert same_bits(found.to(LOW), rounded)
    assert double is None or same_bits(double, log_probs_of(head.double()))


def test_a_backward_pass_under_autocast_multiplies_what_the_forward_did(backend: str) -> None:
    head = mixed(LOW, torch.float32)
    found = []
    for enabled in (False, True):
        operands = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
        log_probs = log_probs_of(Head(*operands, head.labels, head.batch))
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            found.append(torch.autograd.grad(log_probs.sum(), operands))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_two_dtypes_and_autocast_compile() -> None:
    torch._dynamo.reset()

    def under_autocast(**arguments: Any) -> Any:
        with torch.autocast("cpu", dtype=LOW):
            return fused_linear_ctpo(**arguments)

    for function, weight in ((fused_linear_ctpo, torch.float32), (under_autocast, torch.float32)):
        head = mixed(LOW if function is fused_linear_ctpo else torch.float32, weight)
        arguments = head.arguments() | {"labels": head.labels.clamp(min=0), "chunk_size": 16}
        arguments["weight"] = head.weight.clone().requires_grad_()
        found = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            loss, _, log_probs = call(**arguments)
            found.append((log_probs, *torch.autograd.grad(loss, arguments["weight"])))
        assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def test_float32_weight_takes_its_gradient_into_main_grad(backend: str) -> None:
    head = mixed(LOW, torch.float32)
    weight: Any = head.weight.clone().requires_grad_()
    weight.main_grad = torch.ones_like(head.weight)
    loss, *_ = fused_linear_ctpo(**{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True)
    loss.backward()
    assert distance(weight.main_grad - 1.0, sweep(head).d_weight.double()) <= 1e-5
