"""`ctpo_loss` on both backends against the float64 reference: packings, values, modes, and the table of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import ctpo_loss
from ctpo_kernels.names import LOSS_AGG_MODES
from ctpo_kernels.names import RATIO_MODES as RATIOS
from tests.kernels.packings import LIMITED, PACKINGS, STEP, Found, assert_reference, boundaries, random_batch, run
from tests.kernels.reference import ctpo_loss_reference
from tests.support.pairwise import pairwise

PRECISIONS = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)]
PRECISION = "backend, dtype"
COUNTS = {"batch_num_tokens": 1234, "global_batch_size": 77}
precisions = pytest.mark.parametrize(("backend", "dtype"), PRECISIONS, indirect=["backend"])


def check(batch: dict[str, Tensor], **keywords: Any) -> Found:
    found = run(batch, **keywords)
    assert_reference(found, ctpo_loss_reference(**batch, **keywords))
    return found


@pairwise({PRECISION: PRECISIONS, "name": [*PACKINGS], "padding": [0, 5]}, indirect=["backend"])
def test_every_packing(backend: str, dtype: torch.dtype, name: str, padding: int) -> None:
    check(random_batch(1, PACKINGS[name], dtype=dtype, padding=padding))


@precisions
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.05, 0.5, 3.0, 12.0])
def test_every_spread(backend: str, dtype: torch.dtype, spread: float) -> None:
    """From equal policies to |d| past 20 and S past 10."""
    found = check(random_batch(2, [90, 70, 40], spread=spread, dtype=dtype))
    if spread == 0:
        assert found.per_token.log_ratio.abs().max() == 0
    if spread == 12:
        assert found.stats.sums[-1] > 0
        assert found.per_token.log_ratio.abs().max() > 20


@precisions
def test_ratio_that_falls_past_minus_700(backend: str, dtype: torch.dtype) -> None:
    batch = random_batch(3, [60, 60], spread=0.5, dtype=dtype)
    batch["log_probs"] = batch["log_probs"] - 19.0
    found = check(batch)
    assert found.per_token.log_ratio.min() < -700


@pairwise({PRECISION: PRECISIONS, "ratio": RATIOS, "power": [0.0, 0.5, -0.5, 0.3]}, indirect=["backend"])
def test_every_ratio_and_power(backend: str, dtype: torch.dtype, ratio: str, power: float) -> None:
    check(random_batch(4, [50, 0, 40, 30, 9], spread=0.04, dtype=dtype), ratio_mode=ratio, clip_power=power)


@pairwise({PRECISION: PRECISIONS, "ratio": RATIOS, "clip_c": [3.0, None, -1.0]}, indirect=["backend"])
def test_bounds_on_the_ratio_itself(backend: str, dtype: torch.dtype, ratio: str, clip_c: float | None) -> None:
    batch = random_batch(5, [30, 25, 35], spread=0.4, dtype=dtype)
    check(batch, ratio_mode=ratio, clip_mode="ratio", clip_low=0.2, clip_high=0.28, clip_c=clip_c)


@pairwise(
    {PRECISION: PRECISIONS, "ratio": RATIOS, "clip_low": [1.0, 0.2], "spread": [0.0, 0.4, 12.0]}, indirect=["backend"]
)
def test_a_limited_weight(backend: str, dtype: torch.dtype, ratio: str, clip_low: float, spread: float) -> None:
    batch = random_batch(5, [30, 25, 35], spread=spread, dtype=dtype)
    found = check(batch, ratio_mode=ratio, **{**LIMITED, "clip_low": clip_low})
    learns = batch["loss_mask"] & (batch["advantages"] != 0)
    if spread == 0.4:
        assert torch.equal(found.gradient != 0, learns)
    if spread and ratio in ("cumprod", "token"):
        for sign in (1, -1):
            codes = set(found.per_token.clip[learns & (batch["advantages"] * sign > 0)].tolist())
            assert codes - {0} == ({1, 2} if clip_low < 1 else {1})


@pairwise({PRECISION: PRECISIONS, "mode": LOSS_AGG_MODES, "given": [{}, COUNTS]}, indirect=["backend"])
def test_every_aggregation(backend: str, dtype: torch.dtype, mode: str, given: dict[str, int]) -> None:
    batch = random_batch(6, [30, 25, 0, 35, 8, 8], dtype=dtype, padding=3)
    found = check(batch, loss_agg_mode=mode, loss_scale_factor=7.0, **given)
    on_device = run(batch, loss_agg_mode=mode, loss_scale_factor=7.0, **{k: torch.tensor(v) for k, v in given.items()})
    torch.testing.assert_close(on_device.gradient, found.gradient, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_masks_of_every_dtype(backend: str, mask: torch.dtype) -> None:
    batch = random_batch(9, [30, 20, 10])
    expected = run(batch)
    found = run({**batch, **{name: batch[name].to(mask) for name in ("response_mask", "loss_mask")}})
    assert torch.equal(found.gradient, expected.gradient)
    assert torch.equal(found.per_token.prefix, expected.per_token.prefix)


def one_token_at(log_ratio: float, advantage: float, position: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """A sequence whose last token stands at `position` with S = log_ratio; only that token is in the loss."""
    log_probs = torch.zeros(position, dtype=dtype)
    log_probs[0] = log_ratio
    if abs(log_ratio) > 20:
        log_probs[:] = log_ratio / position
    loss_mask = torch.zeros(position)
    loss_mask[-1] = 1
    return {
        "log_probs": log_probs,
        "old_log_probs": torch.zeros(position, dtype=dtype),
        "response_mask": torch.ones(position),
        "loss_mask": loss_mask,
        "advantages": torch.tensor([advantage], dtype=dtype),
        "cu_seqlens": boundaries([position]),
    }


# low 1/32, high 1/16, dual 1/8; at t = 4 with power 1/2 the bounds double. A ratio equal to its bound is inside.
TABLE = [
    # A, position, log r, clip code, gradient in units of -A r
    (2.0, 4, 0.0, 0, 1),
    (2.0, 4, 0.125, 0, 1),
    (2.0, 4, 0.125 + STEP, 1, 0),
    (2.0, 4, -0.0625, 0, 1),
    (2.0, 4, -0.0625 - STEP, 0, 1),
    (2.0, 4, -3.0, 0, 1),
    (-2.0, 4, -0.0625, 0, 1),
    (-2.0, 4, -0.0625 - STEP, 2, 0),
    (-2.0, 4, 0.125 + STEP, 0, 1),
    (-2.0, 4, 0.25, 0, 1),
    (-2.0, 4, 0.25 + STEP, 3, 0),
    (2.0, 1, 0.0625, 0, 1),
    (2.0, 1, 0.0625 + STEP, 1, 0),
    (-2.0, 1, -0.03125 - STEP, 2, 0),
    (2.0, 16, 0.25, 0, 1),
    (2.0, 16, 0.25 + STEP, 1, 0),
    (0.0, 4, 0.3, 0, 0),
    (0.0, 4, -0.3, 0, 0),
    (-2.0, 4, 11.0, 3, 0),
    (2.0, 4, 11.0, 1, 0),
]


@precisions
def test_gradient_table(backend: str, dtype: torch.dtype) -> None:
    """Every row of the table, equality with a bound included, in one packed call."""
    rows = [one_token_at(x, a, t, dtype) for a, t, x, _, _ in TABLE]
    joined = {name: torch.cat([row[name] for row in rows]) for name in rows[0] if name != "cu_seqlens"}
    joined["cu_seqlens"] = boundaries([row["log_probs"].numel() for row in rows])
    found = run(
        joined, clip_low=1 / 32, clip_high=1 / 16, clip_c=1 / 8, loss_agg_mode="seq-mean-token-sum", global_batch_size=1
    )
    last = joined["cu_seqlens"][1:].long() - 1
    assert found.per_token.clip[last].tolist() == [code for *_, code, _ in TABLE]
    expected = torch.tensor([-a * math.exp(x) * inside for a, _, x, _, inside in TABLE], dtype=torch.float64)
    torch.testing.assert_close(found.gradient[last].double(), expected, rtol=1e-6, atol=0.0)
    assert found.gradient.count_nonzero() == expected.count_nonzero()


@precisions
@pytest.mark.parametrize("clip_c", [None, 1e6])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_gradient_ends_at_the_cap(backend: str, dtype: torch.dtype, advantage: float, clip_c: float | None) -> None:
    for log_ratio, code, inside in ((10.0, 0, 1.0), (10.0 + STEP, 4, 0.0), (15.0, 4, 0.0)):
        batch = one_token_at(log_ratio, advantage, 2, dtype)
        found = run(batch, clip_high=1e6, clip_c=clip_c)
        assert found.per_token.clip[-1] == code
        assert found.stats.sums[-1] == (code == 4)
        expected = -advantage * math.exp(10.0)
        assert float(found.loss) == pytest.approx(expected, rel=1e-6)
        assert float(found.gradient[-1]) == pytest.approx(expected * inside, rel=1e-6)


@precisions
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_limited_weight_keeps_its_gradient_beyond_bound_and_cap(
    backend: str, dtype: torch.dtype, advantage: float
) -> None:
    for log_ratio, high, code, weight in ((10.0 + STEP, 1e6, 4, math.exp(10.0)), (15.0, 4.0, 1, 5.0)):
        batch = one_token_at(log_ratio, advantage, 2, dtype)
        batch["log_probs"][-1] = batch["old_log_probs"][-1] = -0.75
        found = run(batch, **{**LIMITED, "clip_high": high})
        assert found.per_token.clip[-1] == code
        assert found.stats.sums[-1] == 1
        assert float(found.gradient[-1]) == pytest.approx(-advantage * weight, rel=1e-6)
        assert float(found.loss) == pytest.approx(advantage * weight * 0.75, rel=1e-6)


@precisions
def test_token_log_ratio_is_cut_at_20_and_keeps_its_gradient(backend: str, dtype: torch.dtype) -> None:
    batch = one_token_at(0.0, 1.0, 2, dtype)
    batch["log_probs"][:] = torch.tensor([-35.0, 28.0])
    found = run(batch)
    assert found.per_token.prefix.tolist() == [-20 * 2**40, 0]
    assert float(found.gradient[-1]) == pytest.approx(-1.0)


def test_upstream_gradient_multiplies(backend: str) -> None:
    batch = random_batch(12, [20, 20])
    expected = run(batch).gradient
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, _ = ctpo_loss(**{**batch, "log_probs": log_probs})
    (loss * -3.0).backward()
    torch.testing.assert_close(log_probs.grad, -3.0 * expected, rtol=1e-6, atol=0.0)
