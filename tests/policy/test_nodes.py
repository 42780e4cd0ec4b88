"""Nodes of the autograd graph that stand for several operations: the same values and gradients as those."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ctpo_megatron.policy.layers import rms_norm, rotate_packed
from ctpo_megatron.policy.megatron_versions import LATENT_ROTARY

EPS = 1e-6


def gradients(found: torch.Tensor, weight: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad((found * weight).sum(), inputs)


@pytest.mark.parametrize("shape", [(5, 1, 96), (7, 4, 32), (1, 8)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_rms_normalization_is_that_of_torch(shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    x = (size * torch.randn(shape)).requires_grad_()
    weight, way = torch.randn(shape[-1], requires_grad=True), torch.randn(shape)
    found = rms_norm(x, weight, EPS)
    exact_x, exact_weight = (t.detach().double().requires_grad_() for t in (x, weight))
    expected = F.rms_norm(exact_x, (shape[-1],), exact_weight, EPS)
    theirs = gradients(expected, way.double(), exact_x, exact_weight)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    for mine, other in zip(gradients(found, way, x, weight), theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=2e-5, atol=2e-6 * float(other.abs().max()))


def test_rows_of_bfloat16_are_normalized_in_float32() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 64).bfloat16().requires_grad_()
    weight = torch.randn(64).bfloat16().requires_grad_()
    found, expected = rms_norm(x, weight, EPS), F.rms_norm(x.float(), (64,), weight.float(), EPS)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=0.0)
    assert [grad.dtype for grad in gradients(found, torch.ones_like(found), x, weight)] == [torch.bfloat16] * 2


@pytest.mark.parametrize("kwargs", [{"rotary_interleaved": True}, {LATENT_ROTARY: True}, {}])
def test_other_rotations_are_refused(kwargs: dict[str, bool]) -> None:
    width = 8 if kwargs else 4  # of the angles; less than a head's turns a part of it
    with pytest.raises(ValueError, match="halves of whole heads"):
        rotate_packed(torch.zeros(2, 1, 8), None, torch.zeros(2, 1, 1, width), **kwargs)
