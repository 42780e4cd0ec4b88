"""Boundaries that are none. On a GPU nobody reads them back: kernels must stay inside the batch, and say that they did.

Every tensor is a piece of a longer one, so that what a kernel reads or writes outside shows.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import LossSpec

N, GUARD = 40, 256
WRITTEN = 777.0
WRONG = {
    "one past the end": [0, 20, 41],
    "far past the end": [0, 100, 140],
    "falling": [0, 30, 10],
    "far and back": [0, 1 << 30, 10, 40],
    "below zero": [-8, 20, 40],
    "not from zero on": [8, 20, 40],
}


def guarded(value: float, dtype: torch.dtype = torch.float32, outside: float = math.nan) -> Tensor:
    """`[N]` in the middle of a longer tensor."""
    whole = torch.full((GUARD + N + GUARD,), outside, dtype=dtype)
    whole[GUARD : GUARD + N] = value
    return whole[GUARD : GUARD + N]


def batch_with(cu: list[int]) -> PackedTokens:
    """As `PackedTokens.of` would make it of tensors on a GPU: it refuses these boundaries on the CPU."""
    ones = guarded(1, torch.uint8, outside=1)
    advantages = torch.ones(len(cu) - 1, 1)
    return PackedTokens(guarded(-1.0), guarded(-1.01), ones, None, advantages, None, torch.tensor(cu))


@pytest.fixture
def gradient(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The memory in which the next gradient will lie, with what lies around it."""
    whole = torch.full((GUARD + N + GUARD,), WRITTEN)
    monkeypatch.setattr(torch, "empty_like", lambda like: whole[GUARD : GUARD + N])
    return whole


def assert_inside(gradient: Tensor) -> None:
    assert (gradient[:GUARD] == WRITTEN).all()
    assert (gradient[GUARD + N :] == WRITTEN).all()


@pytest.mark.parametrize("cu", WRONG.values(), ids=WRONG)
def test_wrong_boundaries_make_the_loss_nan_and_touch_nothing_else(gradient: Tensor, cu: list[int]) -> None:
    from ctpo_kernels import loss_triton

    out = loss_triton.loss_pass(batch_with(cu), LossSpec(), 0.25)
    assert_inside(gradient)
    assert out.loss.isnan()
    assert float(out.vector[2]) <= N, "tokens outside of the batch were counted"
    assert gradient.isnan().any(), "a norm of this gradient must not look finite"


@pytest.mark.parametrize("cu", [[0, 100, 140], [0, 30, 10]])
def test_windows_of_wrong_boundaries(gradient: Tensor, cu: list[int]) -> None:
    from ctpo_kernels import loss_triton

    batch, state = batch_with(cu), torch.zeros(len(cu) - 1, 3, dtype=torch.int64)
    spec = LossSpec(loss_agg_mode="token-mean")
    stream = loss_triton.TritonLossStream(batch, spec, 0.25, totals=None, state=state)
    for start, end in ((0, 24), (24, N)):
        stream.step(start, end)
    assert_inside(gradient)
    assert stream.finish()[0].isnan()
