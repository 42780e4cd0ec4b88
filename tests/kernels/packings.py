"""Packed batches for the kernel tests, the calls on them, and the comparison with the float64 reference.

Log-probs are multiples of 2^-14, so that d_t is exact in float32 too: S_t and the clip decisions must then be those of
the reference to the last bit, in every precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctpo_kernels import MAXIMA, SUMS, CTPOStats, PerToken, ctpo_loss
from tests.kernels.reference import LossReference

STEP = 2.0**-14
COUNTS = ("loss_tokens", "model_tokens", "clip_high", "clip_low", "clip_dual", "capped")
LIMITED = {"clip_mode": "detached_ratio", "clip_low": 1.0, "clip_high": 0.28, "clip_c": None}
"""Keywords of a weight that is limited; as in the presets, its lower bound is 0."""
PACKINGS: dict[str, list[int]] = {
    "one long": [300],
    "one token": [1],
    "many short": [3, 1, 2, 7, 1, 5, 4, 1, 1, 9, 2, 6],
    "empty sequences between": [0, 21, 0, 0, 34, 0],
    "only empty sequences": [0, 0],
    "no sequence": [],
    "starts at multiples of 16": [16, 48, 32],
    "lengths around a tile": [63, 64, 65, 1, 128],
}


def random_batch(
    seed: int,
    lengths: Sequence[int],
    *,
    spread: float = 0.05,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
) -> dict[str, Tensor]:
    """Arguments of `ctpo_loss`, everything per token; what is masked or padding holds NaN wherever a float can stand.

    Sequences take turns: prompt and two turns with an observation between them, every token sampled, random gaps, and
    (the fourth of four, where there are as many) all masked. A sixth of the response tokens is out of the loss.
    """
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths) + padding
    response = torch.zeros(n, dtype=torch.bool)
    start = 0
    for number, length in enumerate(lengths):
        inside = torch.arange(length)
        pattern = {
            0: (inside >= length // 8) & ((inside < length // 2) | (inside >= length // 2 + length // 6)),
            1: torch.ones(length, dtype=torch.bool),
            2: torch.rand(length, generator=g) < 0.7,
            3: torch.zeros(length, dtype=torch.bool),
        }[number % 4]
        response[start : start + length] = pattern
        start += length
    old = dyadic(-4 * torch.rand(n, generator=g))
    log_probs = old + dyadic(spread * torch.randn(n, generator=g))
    advantages = torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.85)
    outside = ~response
    for values in (old, log_probs, advantages):
        values[outside] = math.nan
    return {
        "log_probs": log_probs.to(dtype),
        "old_log_probs": old.to(dtype),
        "response_mask": response,
        "advantages": advantages.to(dtype),
        "cu_seqlens": boundaries(lengths),
        "loss_mask": response & (torch.rand(n, generator=g) < 5 / 6),
        "weights": torch.where(response, 0.25 + 1.5 * torch.rand(n, generator=g), torch.nan).to(dtype),
    }


def dyadic(values: Tensor) -> Tensor:
    """Rounded to multiples of STEP."""
    return torch.round(values / STEP) * STEP


def boundaries(lengths: Sequence[int]) -> Tensor:
    """int32 `[B + 1]`."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def without(batch: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name not in names}


@dataclass(frozen=True)
class Found:
    """What one call gave."""

    loss: Tensor
    gradient: Tensor
    stats: CTPOStats
    per_token: PerToken


def run(batch: dict[str, Tensor], **keywords: Any) -> Found:
    """`ctpo_loss` forward and backward."""
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, stats, per_token = ctpo_loss(**{**batch, "log_probs": log_probs}, return_per_token=True, **keywords)
    loss.backward()
    return Found(loss.detach(), log_probs.grad, stats, per_token)


def same_bits(a: Any, b: Any) -> bool:
    """Equality of tensors to the last bit, NaN equal to NaN; of the fields of dataclasses, one by one."""
    if isinstance(a, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(torch.nan_to_num(a, nan=0.0), torch.nan_to_num(b, nan=0.0)) and torch.equal(
            a.isnan(), b.isnan()
        )
    return all(same_bits(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)


def distance(found: Tensor, expected: Tensor | list) -> float:
    """Frobenius norm of the difference over that of `expected`; of all of `found` where nothing is expected."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    if found.numel() == expected.numel() == 0:  # a list cannot tell [0, H] from [0]
        return 0.0
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.double().nan_to_num(), expected.nan_to_num()
    norm = float(expected.norm())
    return float((found - expected).norm()) / (norm if norm > 0 else 1.0)


def assert_reference(found: Found, expected: LossReference) -> None:
    """The figures of kernels.md: float64 to 1e-12, float32 gradients to 5e-6; integers and decisions to the bit."""
    exact = found.gradient.dtype == torch.float64
    tight, loose = (1e-12, 1e-12) if exact else (2.5e-7, 5e-6)
    nats = torch.tensor(expected.prefix, dtype=torch.float64)
    units = (nats.nan_to_num() * 2.0**40).to(torch.int64)
    known = ~nats.isnan()  # a NaN is no integer: log_ratio tells it
    assert torch.equal(found.per_token.prefix[known], units[known])
    assert found.per_token.clip.tolist() == expected.clip
    assert distance(found.per_token.log_ratio, expected.log_ratio) <= tight
    assert distance(found.per_token.loss, expected.token_loss) <= loose
    assert distance(found.gradient, expected.gradient) <= loose
    slope = torch.tensor(expected.gradient, dtype=torch.float64)
    assert not found.gradient[slope == 0].any()
    assert found.gradient[slope.abs() > 1e-30].all()  # below, float32 may underflow
    # The loss is a sum of terms of both signs: it is as exact as their sizes allow.
    size = max(1.0, abs(expected.loss), sum(abs(x) for x in expected.gradient))
    assert math.isnan(expected.loss) == math.isnan(float(found.loss))
    assert math.isnan(expected.loss) or abs(float(found.loss) - expected.loss) <= loose * size
    assert_stats(found.stats, expected.stats, loose)


def assert_stats(stats: CTPOStats, expected: dict[str, float], tolerance: float) -> None:
    """Counts equal; sums within `tolerance` of the size of their terms; extrema relatively."""
    found = dict(zip((*SUMS, *MAXIMA), [*stats.sums.tolist(), *stats.maxima.tolist()], strict=True))
    tokens = expected["model_tokens"] + 1
    size = tokens * max(1.0, abs(expected["ratio"])) if math.isfinite(expected["ratio"]) else 1.0
    terms = {
        "loss": max(1.0, abs(expected["loss"])),
        "minus_d": max(1e-9, abs(expected["minus_d"])),  # integers where no NaN is: exact
        "ratio_excess": size,
        "ratio_excess_squared": size * max(1.0, abs(expected["ratio"])) if math.isfinite(expected["ratio"]) else 1.0,
    }
    for name, value in expected.items():
        if name in COUNTS:
            assert found[name] == value, name
        elif math.isnan(value) or math.isinf(value):
            assert str(found[name]) == str(value), name
        else:
            allowed = tolerance * terms.get(name, max(abs(value), 1e-30))
            assert abs(found[name] - value) <= allowed, (name, found[name], value)
