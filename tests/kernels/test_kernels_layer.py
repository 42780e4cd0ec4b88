"""SwiGLU and rotary embedding against float64, by both backends: values, gradients, launches, strides, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ctpo_kernels as ck

ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Of one result, relative to its size: float32 has the rounding of a few operations, and Triton's interpreter cuts off
what bfloat16 does not hold, where a device rounds to the nearest number."""
OPERATIONS = 5
"""That round in the torch backend in 16 bits, where a kernel rounds once."""


def exact_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def exact_rotation(t: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = t.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def compare(backend: str, ours: Callable[..., Tensor], exact: Callable[..., Tensor], x: Tensor, *more: Tensor) -> None:
    """Result and gradient; a sum of products may cancel, so that errors are relative to the largest number."""
    x, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    found, expected = ours(x, *more), exact(wide, *(each.double() for each in more))
    grad = torch.randn(found.shape).to(x.dtype)
    (x_grad,), (wide_grad,) = torch.autograd.grad(found, x, grad), torch.autograd.grad(expected, wide, grad.double())
    steps = OPERATIONS if backend == "torch" and x.dtype != torch.float32 else 1
    for mine, theirs in ((found.detach(), expected.detach()), (x_grad, wide_grad)):
        assert mine.dtype == x.dtype and mine.shape == theirs.shape
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(mine.double(), theirs, rtol=0.0, atol=steps * ROUNDING[x.dtype] * largest)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(3, 1, 40), (2, 2054), (1, 2), (0, 1, 8)], ids=str)
def test_swiglu(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """2054: more than one program takes of a row, and no multiple of anything."""
    compare(backend, ck.swiglu, exact_swiglu, (3 * torch.randn(shape)).to(dtype))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", [(5, 4, 16), (2, 3, 80), (3, 1, 8), (2, 17, 256), (0, 2, 8)], ids=str)
def test_rotation(backend: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """17 heads of 256: more than a program takes at a time."""
    angle = 100 * torch.rand(shape[0], 1, shape[2] // 2)
    compare(
        backend, ck.rotate, exact_rotation, torch.randn(shape).to(dtype), angle.cos().to(dtype), angle.sin().to(dtype)
    )


@pytest.mark.parametrize("gate", [-1e30, -200.0, -0.0, 0.0, 200.0, 1e30, torch.inf, torch.nan])
def test_swiglu_of_extreme_gates(backend: str, gate: float) -> None:
    x = torch.tensor([[gate, 2.0]], requires_grad=True)
    expected = torch.nn.functional.silu(torch.tensor(gate)) * 2.0
    found = ck.swiglu(x)
    torch.testing.assert_close(found, expected.reshape(1, 1), equal_nan=True)
    if abs(gate) < 1e10:
        found.backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_keys_among_queries_are_rotated_where_they_are(backend: str) -> None:
    """Of a product [n, groups, queries, key, value], as a layer has without norms of keys."""
    product = torch.randn(6, 2, 5 * 16)
    keys, angle = product[:, :, 48:64], torch.rand(6, 1, 8)
    found = ck.rotate(keys, angle.cos(), angle.sin())
    assert torch.equal(found, ck.rotate(keys.contiguous(), angle.cos(), angle.sin())) and found.is_contiguous()
    by_columns = torch.randn(16, 2, 6).permute(2, 1, 0)
    turned = ck.rotate(by_columns, angle.cos(), angle.sin())
    assert torch.equal(turned, ck.rotate(by_columns.contiguous(), angle.cos(), angle.sin()))


def test_a_rotation_back_gives_what_was_turned(backend: str) -> None:
    t, angle = torch.randn(4, 2, 32, requires_grad=True), torch.rand(4, 1, 16)
    turned = ck.rotate(t, angle.cos(), angle.sin())
    turned.backward(turned.detach())
    assert t.grad is not None
    torch.testing.assert_close(t.grad, t.detach(), rtol=0.0, atol=1e-5)


def test_one_launch_in_each_direction(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    run, launched = GridExecutor.__call__, list[str]()

    def note(self: GridExecutor, *arguments: object, **named: object) -> None:
        launched.append(self.fn.__name__)
        run(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", note)
    ck.swiglu(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert launched == ["swiglu_kernel", "swiglu_grad_kernel"]
    launched.clear()
    ck.rotate(torch.randn(3, 2, 8, requires_grad=True), torch.ones(3, 1, 4), torch.zeros(3, 1, 4)).sum().backward()
    assert launched == ["rotary_kernel", "rotary_kernel"]


def test_what_is_saved_for_the_backward_pass() -> None:
    """The rows that come in, and none of what is computed of them."""
    saved = list[Tensor]()
    x, t, angle = torch.randn(3, 8, requires_grad=True), torch.randn(3, 2, 8, requires_grad=True), torch.rand(3, 1, 4)
    with torch.autograd.graph.saved_tensors_hooks(lambda given: saved.append(given) or given, lambda kept: kept):
        ck.swiglu(x), ck.rotate(t, angle, angle)
    assert [each.data_ptr() for each in saved] == [x.data_ptr(), angle.data_ptr(), angle.data_ptr()]


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.zeros(()), torch.zeros(2, 4, dtype=torch.int32)], ids=str)
def test_other_rows_of_swiglu_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"x must be floating-point \[\.\.\., 2 F\]; got"):
        ck.swiglu(x)


@pytest.mark.parametrize(
    ("t", "angles"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 1, 4)),
        (torch.zeros(2, 1, 7), torch.zeros(2, 1, 3)),
        (torch.zeros(2, 3, 8), torch.zeros(2, 3, 4)),
        (torch.zeros(2, 3, 8), torch.zeros(1, 1, 4)),
        (torch.zeros(2, 3, 8), torch.zeros(2, 1, 4, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, 8, dtype=torch.int64), torch.zeros(2, 1, 4, dtype=torch.int64)),
    ],
)
def test_other_angles_are_refused(t: Tensor, angles: Tensor) -> None:
    with pytest.raises(ValueError, match=r"cosine and sine \[n, 1, d/2\] of its dtype; got"):
        ck.rotate(t, angles, angles)
