"""The weight gradient in `weight.main_grad`, and the rules of one backward pass per forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ctpo_kernels import fused_linear_ctpo, linear_log_probs
from tests.kernels.heads import Head, random_head, sweep
from tests.kernels.packings import distance, same_bits


def with_main_grad(head: Head, start: float = 0.0) -> Tensor:
    """The weight as megatron's DDP leaves it."""
    weight = head.weight.clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, start, dtype=torch.float32)
    weight.grad_added_to_main_grad = False
    return weight


@pytest.mark.parametrize("ratio", ["cumprod", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_added_in_float32(backend: str, dtype: torch.dtype, ratio: str) -> None:
    head = random_head(1, dtype=dtype)
    weight = with_main_grad(head, start=0.5)
    hidden = head.hidden.clone().requires_grad_()
    arguments = {**head.arguments(), "weight": weight, "hidden": hidden}
    loss, _, _ = fused_linear_ctpo(**arguments, accumulate_into_main_grad=True, chunk_size=16, ratio_mode=ratio)
    assert weight.grad_added_to_main_grad is False
    loss.backward()
    assert weight.grad_added_to_main_grad is True
    wide = Head(head.hidden.float(), head.weight.float(), head.labels, head.batch)
    expected = sweep(wide, chunk_size=16, ratio_mode=ratio)
    assert weight.main_grad.dtype == torch.float32
    assert distance(weight.main_grad - 0.5, expected.d_weight.double()) <= 5e-6
    assert same_bits(hidden.grad, sweep(head, chunk_size=16, ratio_mode=ratio).d_hidden)
    assert weight.grad.shape == weight.shape
    assert weight.grad.dtype == dtype


def test_tied_weight_gets_zeros_beside_the_embedding(backend: str) -> None:
    """The head's part is in main_grad; what autograd adds to the embedding's gradient must be nothing."""
    head = random_head(4)
    weight = with_main_grad(head)
    weight.zero_out_wgrad = True
    tokens = torch.randint(0, 37, (head.hidden.shape[0],))
    embedded = torch.nn.functional.embedding(tokens, weight)
    loss, _, _ = fused_linear_ctpo(
        **{**head.arguments(), "weight": weight, "hidden": head.hidden + 0.0 * embedded.detach()},
        accumulate_into_main_grad=True,
    )
    (loss + embedded.sum()).backward()
    counts = torch.bincount(tokens, minlength=37).float()
    assert torch.equal(weight.grad, counts[:, None].expand_as(weight))
    assert distance(weight.main_grad, sweep(head).d_weight.double()) <= 5e-6


def test_upstream_other_than_one_is_refused(backend: str) -> None:
    head = random_head(5)
    weight = with_main_grad(head)
    loss, _, _ = fused_linear_ctpo(**{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True)
    with pytest.raises(RuntimeError, match=r"upstream gradient of 1; got 0\.5"):
        (loss * 0.5).backward()
    loss, *_ = fused_linear_ctpo(
        **{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True, gradient_scale=SCALE
    )
    with pytest.raises(RuntimeError, match=r"upstream gradient of 65536; got 1\.0. Give it as gradient_scale"):
        loss.backward()


SCALE = 2.0**16


def backward_of_scaled(head: Head, scale: float, **options: object) -> tuple[Tensor, Tensor]:
    """Gradient of the hidden states, and `main_grad`, of the loss times `scale`."""
    weight, hidden = with_main_grad(head), head.hidden.clone().requires_grad_()
    operands = {**head.arguments(), "weight": weight, "hidden": hidden}
    loss, *_ = fused_linear_ctpo(
        **operands, accumulate_into_main_grad=True, chunk_size=16, gradient_scale=scale, **options
    )
    (loss * scale).backward()
    return hidden.grad, weight.main_grad


OPTIONS = [{}, {"ratio_mode": "sequence"}, {"entropy_coef": 0.1}, {"ratio_mode": "sequence", "entropy_coef": 0.1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["one sweep", "two", "one, entropy", "two, entropy"])
def test_a_known_upstream_scalar_scales_both_gradients(backend: str, options: dict[str, object]) -> None:
    head = random_head(5)
    plain, scaled = backward_of_scaled(head, 1.0, **options), backward_of_scaled(head, SCALE, **options)
    for found, expected in zip(scaled, plain, strict=True):
        assert same_bits(found, expected * SCALE) and expected.any()


def test_float16_keeps_gradients_that_the_scale_lifts(backend: str) -> None:
    """Of a mean over a million tokens: below 6e-8, the smallest number of float16."""
    head = random_head(5, dtype=torch.float16)
    head.batch["advantages"] = head.batch["advantages"] * 1e-7
    wide = Head(head.hidden.float(), head.weight.float(), head.labels, head.batch)
    expected = sweep(wide, chunk_size=16)
    assert backward_of_scaled(head, 1.0)[0].eq(0).float().mean() > 0.9
    found = backward_of_scaled(head, 2.0**24)
    assert distance(found[0].double() / 2**24, expected.d_hidden.double()) <= 2**-10
    assert distance(found[1].double() / 2**24, expected.d_weight.double()) <= 2**-10


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_gradient_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="gradient_scale: must be a positive, finite number; got"):
        backward_of_scaled(random_head(5), scale)


@pytest.mark.parametrize("main_grad", [None, "absent"])
def test_weight_without_main_grad_is_refused(main_grad: str | None) -> None:
    head = random_head(6)
    weight = head.weight.clone().requires_grad_()
    if main_grad is None:
        weight.main_grad = None
    with pytest.raises(ValueError, match="accumulate_into_main_grad: weight has no main_grad"):
        fused_linear_ctpo(**{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True)


def test_second_backward_is_refused(backend: str) -> None:
    head = random_head(8)
    weight = head.weight.clone().requires_grad_()
    loss, _, _ = fused_linear_ctpo(**{**head.arguments(), "weight": weight})
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()
    assert torch.equal(weight.grad, first)


@pytest.mark.parametrize("operation", ["fused", "linear"])
def test_gradients_of_one_side_only(backend: str, operation: str) -> None:
    head = random_head(9)
    both = {}
    for sides in (("hidden", "weight"), ("hidden",), ("weight",)):
        operands = {name: getattr(head, name).clone() for name in ("hidden", "weight")}
        for name in sides:
            operands[name].requires_grad_()
        if operation == "fused":
            loss, _, _ = fused_linear_ctpo(**{**head.arguments(), **operands}, chunk_size=16)
        else:
            loss = linear_log_probs(
                **operands, labels=head.labels, mask=head.batch["response_mask"], chunk_size=16
            ).sum()
        loss.backward()
        for name in ("hidden", "weight"):
            gradient = operands[name].grad
            assert (gradient is not None) == (name in sides)
            if gradient is not None:
                assert same_bits(gradient, both.setdefault(name, gradient))


def test_without_grad_mode(backend: str) -> None:
    head = random_head(10)
    expected = sweep(head)
    weight = head.weight.clone().requires_grad_()
    with torch.no_grad():
        loss, stats, log_probs = fused_linear_ctpo(**{**head.arguments(), "weight": weight})
    assert not loss.requires_grad
    assert same_bits(loss, expected.loss)
    assert same_bits(log_probs, expected.log_probs)
    assert same_bits(stats, expected.stats)


def test_main_grad_stays_as_it_is_without_grad_mode(backend: str) -> None:
    head = random_head(10)
    weight = with_main_grad(head)
    with torch.no_grad():
        fused_linear_ctpo(**{**head.arguments(), "weight": weight}, accumulate_into_main_grad=True)
    assert not weight.main_grad.any()
    assert weight.grad_added_to_main_grad is False


def test_only_the_loss_carries_gradients(backend: str) -> None:
    head = random_head(11)
    weight = head.weight.clone().requires_grad_()
    loss, stats, log_probs = fused_linear_ctpo(**{**head.arguments(), "weight": weight})
    assert loss.requires_grad
    assert not log_probs.requires_grad
    assert not stats.sums.requires_grad
    assert not stats.maxima.requires_grad


def test_double_backward_is_refused(backend: str) -> None:
    head = random_head(12)
    hidden = head.hidden.clone().requires_grad_()
    loss, _, _ = fused_linear_ctpo(**{**head.arguments(), "hidden": hidden})
    scale = torch.ones((), requires_grad=True)
    (gradient,) = torch.autograd.grad(loss * scale, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
