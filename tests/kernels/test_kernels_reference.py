"""The float64 reference itself: against hand-computed numbers and against the objective, written by other hands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ctpo_kernels.names import LOSS_AGG_MODES, RATIO_MODES
from ctpo_megatron.objective import PolicyObjective, policy_loss
from tests.kernels.packings import distance, random_batch
from tests.kernels.reference import ctpo_loss_reference
from tests.support.pairwise import pairwise


def test_by_hand() -> None:
    """Two sequences; a masked token between, a rejected one, a clip of each kind, position counted over the mask."""
    found = ctpo_loss_reference(
        [-1.0, -9.0, -1.5, -2.0, -1.0, -1.0],
        [-1.02, 3.0, -1.5, -2.2, -0.9, -1.4],
        [1, 0, 1, 1, 1, 1],
        [2.0, -3.0],
        [0, 4, 6],
        loss_mask=[1, 1, 0, 1, 1, 1],
        loss_agg_mode="token-mean",
    )
    assert found.prefix == pytest.approx([0.02, 0.0, 0.02, 0.22, -0.1, 0.3])
    # bounds at t = 3: 0.05 sqrt 3 = 0.087; sequence 2: -0.025 at t = 1 and 0.05 sqrt 2 = 0.071 at t = 2
    assert found.clip == [0, 0, 0, 1, 2, 3]
    of_positive, of_negative = (0.02, 0.05 * 3**0.5), (-0.025, 0.05 * 2**0.5)
    losses = [*(-2 * math.exp(x) for x in of_positive), *(3 * math.exp(x) for x in of_negative)]
    losses[1:1] = [0, 0]
    assert found.token_loss == pytest.approx(losses)
    assert found.loss == pytest.approx(sum(losses) / 4)
    assert found.gradient == pytest.approx([-2 * math.exp(0.02) / 4, 0, 0, 0, 0, 0])
    assert found.stats["minus_d"] == pytest.approx(-(0.02 + 0.0 + 0.2 - 0.1 + 0.4))
    assert (found.stats["loss_tokens"], found.stats["model_tokens"]) == (4, 5)
    assert found.stats["ratio"] == pytest.approx(math.exp(0.3))
    assert found.stats["minus_ratio"] == pytest.approx(-math.exp(-0.1))


CLIPS = [
    {"clip_mode": "log_power", "clip_low": 0.025, "clip_high": 0.05, "clip_c": 0.05},
    {"clip_mode": "ratio", "clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0},
    {"clip_mode": "detached_ratio", "clip_low": 0.2, "clip_high": 0.28, "clip_c": None},
]


@pairwise({"ratio": RATIO_MODES, "aggregation": LOSS_AGG_MODES, "clip": CLIPS, "spread": [0.03, 0.5, 8.0]})
def test_equals_the_objective(ratio: str, aggregation: str, clip: dict[str, Any], spread: float) -> None:
    batch = random_batch(1, [30, 0, 25, 12, 7], spread=spread, dtype=torch.float64)
    options = {"ratio_mode": ratio, "loss_agg_mode": aggregation, "loss_scale_factor": 5.0, **clip}
    log_probs = batch["log_probs"].clone().requires_grad_()
    tokens = (batch[name] for name in ("old_log_probs", "advantages", "response_mask"))
    rest = {name: batch[name] for name in ("loss_mask", "weights", "cu_seqlens")}
    theirs = policy_loss(log_probs, *tokens, PolicyObjective(**options), **rest)
    theirs.loss.backward()
    ours = ctpo_loss_reference(**batch, **options)
    assert distance(log_probs.grad, ours.gradient) <= 1e-12
    assert distance(theirs.per_token.detach(), ours.token_loss) <= 1e-12
    assert theirs.loss.item() == pytest.approx(ours.loss, rel=1e-12, abs=1e-12)
    sums = dict(zip(ours.stats, [*theirs.stats.sums.tolist(), *theirs.stats.maxima.tolist()], strict=True))
    assert sums == pytest.approx(ours.stats, rel=1e-11, abs=1e-11)
