"""The weight gradient in `weight.main_grad`, and the rules of one backward pass per forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import fused_linear_ctpo, linear_log_probs
from tests.kernels.heads import Head, random_head, sweep
from tests.kernels.packings import distance, same_bits
from tests.support.pairwise import pairwise

SCALE = 2.0**16


def with_main_grad(head: Head, start: float = 0.0) -> Tensor:
    """The weight as megatron's DDP leaves it."""
    weight = head.weight.clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, start, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    return weight


def loss_of(head: Head, weight: Tensor, **options: Any) -> Tensor:
    """The loss with that weight and other options of `fused_linear_ctpo`."""
    return fused_linear_ctpo(**head.arguments() | {"weight": weight} | options)[0]


def into(head: Head, weight: Tensor, **options: Any) -> Tensor:
    """The same, with the weight's gradient added to its `main_grad`."""
    return loss_of(head, weight, accumulate_into_main_grad=True, **options)


def widened(head: Head) -> Head:
    return Head(head.hidden.float(), head.weight.float(), head.labels, head.batch)


@pairwise(
    {
        "backend": ["torch", "triton"],
        "dtype": [torch.float32, torch.bfloat16],
        "ratio": ["cumprod", "sequence"],
    },
    indirect=["backend"],
)
def test_gradient_is_added_in_float32(backend: str, dtype: torch.dtype, ratio: str) -> None:
    head, options = random_head(1, dtype=dtype), {"chunk_size": 16, "ratio_mode": ratio}
    weight, hidden = with_main_grad(head, start=0.5), head.hidden.clone().requires_grad_()
    loss = into(head, weight, hidden=hidden, **options)
    assert weight.grad_added_to_main_grad is False
    loss.backward()
    assert weight.grad_added_to_main_grad is True
    assert weight.main_grad.dtype == torch.float32
    assert distance(weight.main_grad - 0.5, sweep(widened(head), **options).d_weight.double()) <= 5e-6
    assert same_bits(hidden.grad, sweep(head, **options).d_hidden)
    assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, dtype)


def test_tied_weight_gets_zeros_beside_the_embedding(backend: str) -> None:
    """The head's part is in main_grad; what autograd adds to the embedding's gradient must be nothing."""
    head = random_head(4)
    weight = with_main_grad(head)
    weight.zero_out_wgrad = True
    tokens = torch.randint(0, 37, (head.hidden.shape[0],))
    embedded = torch.nn.functional.embedding(tokens, weight)
    (into(head, weight, hidden=head.hidden + 0.0 * embedded.detach()) + embedded.sum()).backward()
    counts = torch.bincount(tokens, minlength=37).float()
    assert torch.equal(weight.grad, counts[:, None].expand_as(weight))
    assert distance(weight.main_grad, sweep(head).d_weight.double()) <= 5e-6


def test_upstream_other_than_one_is_refused(backend: str) -> None:
    head = random_head(5)
    weight = with_main_grad(head)
    with pytest.raises(RuntimeError, match=r"upstream gradient of 1; got 0\.5"):
        (into(head, weight) * 0.5).backward()
    with pytest.raises(RuntimeError, match=r"upstream gradient of 65536; got 1\.0. Give it as gradient_scale"):
        into(head, weight, gradient_scale=SCALE).backward()


def backward_of_scaled(head: Head, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Gradient of the hidden states, and `main_grad`, of the loss times `scale`."""
    weight, hidden = with_main_grad(head), head.hidden.clone().requires_grad_()
    (into(head, weight, hidden=hidden, chunk_size=16, gradient_scale=scale, **options) * scale).backward()
    return hidden.grad, weight.main_grad


OPTIONS = [{}, {"ratio_mode": "sequence"}, {"entropy_coef": 0.1}, {"ratio_mode": "sequence", "entropy_coef": 0.1}]


@pytest.mark.parametrize(
    "options",
    [pytest.param(each, marks=pytest.mark.slow if each in OPTIONS[1:3] else ()) for each in OPTIONS],
    ids=["one sweep", "two", "one, entropy", "two, entropy"],
)
def test_a_known_upstream_scalar_scales_both_gradients(backend: str, options: dict[str, object]) -> None:
    head = random_head(5)
    plain, scaled = backward_of_scaled(head, 1.0, **options), backward_of_scaled(head, SCALE, **options)
    for found, expected in zip(scaled, plain, strict=True):
        assert same_bits(found, expected * SCALE) and expected.any()


def test_float16_keeps_gradients_that_the_scale_lifts(backend: str) -> None:
    """Of a mean over a million tokens: below 6e-8, the smallest number of float16."""
    head = random_head(5, dtype=torch.float16)
    head.batch["advantages"] = head.batch["advantages"] * 1e-7
    expected = sweep(widened(head), chunk_size=16)
    assert backward_of_scaled(head, 1.0)[0].eq(0).float().mean() > 0.9
    for found, wanted in zip(backward_of_scaled(head, 2.0**24), (expected.d_hidden, expected.d_weight), strict=True):
        assert distance(found.double() / 2**24, wanted.double()) <= 2**-10


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_gradient_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="gradient_scale: must be a positive, finite number; got"):
        backward_of_scaled(random_head(5), scale)


@pytest.mark.parametrize("absent", [True, False])
def test_weight_without_main_grad_is_refused(absent: bool) -> None:
    weight = with_main_grad(random_head(6))
    weight.main_grad = None
    if absent:
        del weight.main_grad
    with pytest.raises(ValueError, match="accumulate_into_main_grad: weight has no main_grad"):
        into(random_head(6), weight)


def test_second_backward_is_refused(backend: str) -> None:
    head = random_head(8)
    weight = head.weight.clone().requires_grad_()
    loss = loss_of(head, weight)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()
    assert torch.equal(weight.grad, first)


@pytest.mark.parametrize("operation", ["fused", "linear"])
def test_gradients_of_one_side_only(backend: str, operation: str) -> None:
    head = random_head(9)
    both: dict[str, Tensor] = {}
    for sides in (("hidden", "weight"), ("hidden",), ("weight",)):
        operands = {name: getattr(head, name).clone().requires_grad_(name in sides) for name in ("hidden", "weight")}
        if operation == "fused":
            loss = loss_of(head, **operands, chunk_size=16)
        else:
            mask = head.batch["response_mask"]
            loss = linear_log_probs(**operands, labels=head.labels, mask=mask, chunk_size=16).sum()
        loss.backward()
        for name, operand in operands.items():
            assert (operand.grad is not None) == (name in sides)
            if operand.grad is not None:
                assert same_bits(operand.grad, both.setdefault(name, operand.grad))


def test_without_grad_mode(backend: str) -> None:
    head = random_head(10)
    expected, weight = sweep(head), with_main_grad(head)
    with torch.no_grad():
        loss, stats, log_probs = fused_linear_ctpo(**{**head.arguments(), "weight": weight})
        assert not loss.requires_grad and not into(head, weight).requires_grad
    assert same_bits(loss, expected.loss)
    assert same_bits(log_probs, expected.log_probs)
    assert same_bits(stats, expected.stats)
    assert not weight.main_grad.any() and weight.grad_added_to_main_grad is False


def test_only_the_loss_carries_gradients(backend: str) -> None:
    head = random_head(11)
    weight = head.weight.clone().requires_grad_()
    loss, stats, log_probs = fused_linear_ctpo(**{**head.arguments(), "weight": weight})
    others = (log_probs, stats.sums, stats.maxima)
    assert loss.requires_grad and not any(other.requires_grad for other in others)


def test_double_backward_is_refused(backend: str) -> None:
    head = random_head(12)
    hidden = head.hidden.clone().requires_grad_()
    scale = torch.ones((), requires_grad=True)
    loss = loss_of(head, head.weight, hidden=hidden)
    (gradient,) = torch.autograd.grad(loss * scale, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
