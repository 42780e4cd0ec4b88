"""The float64 reference itself: against hand-computed numbers and against the objective, written by other hands."""

from __future__ import annotations

import math

import pytest
import torch

from ctpo_kernels.names import LOSS_AGG_MODES, RATIO_MODES
from ctpo_megatron.objective import PolicyObjective, policy_loss
from tests.kernels.packings import distance, random_batch, without
from tests.kernels.reference import ctpo_loss_reference, linear_ctpo_reference, log_probs_reference
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
    losses = [
        -2 * math.exp(0.02),
        0,
        0,
        -2 * math.exp(0.05 * 3**0.5),
        3 * math.exp(-0.025),
        3 * math.exp(0.05 * 2**0.5),
    ]
    assert found.token_loss == pytest.approx(losses)
    assert found.loss == pytest.approx(sum(losses) / 4)
    assert found.gradient == pytest.approx([-2 * math.exp(0.02) / 4, 0, 0, 0, 0, 0])
    assert found.stats["minus_d"] == pytest.approx(-(0.02 + 0.0 + 0.2 - 0.1 + 0.4))
    assert (found.stats["loss_tokens"], found.stats["model_tokens"]) == (4, 5)
    assert found.stats["ratio"] == pytest.approx(math.exp(0.3))
    assert found.stats["minus_ratio"] == pytest.approx(-math.exp(-0.1))


@pairwise(
    {
        "ratio": RATIO_MODES,
        "aggregation": LOSS_AGG_MODES,
        "clip, low, high, dual": [("log_power", 0.025, 0.05, 0.05), ("ratio", 0.2, 0.28, 3.0)],
        "spread": [0.03, 0.5, 8.0],
    }
)
def test_equals_the_objective(
    ratio: str, aggregation: str, clip: str, low: float, high: float, dual: float, spread: float
) -> None:
    batch = random_batch(1, [30, 0, 25, 12, 7], spread=spread, dtype=torch.float64)
    objective = PolicyObjective(
        ratio_mode=ratio,
        clip_mode=clip,
        clip_low=low,
        clip_high=high,
        clip_c=dual,
        loss_agg_mode=aggregation,
        loss_scale_factor=5.0,
    )
    log_probs = batch["log_probs"].clone().requires_grad_()
    theirs = policy_loss(
        log_probs,
        batch["old_log_probs"],
        batch["advantages"],
        batch["response_mask"],
        objective,
        loss_mask=batch["loss_mask"],
        weights=batch["weights"],
        cu_seqlens=batch["cu_seqlens"],
    )
    theirs.loss.backward()
    ours = ctpo_loss_reference(
        **batch,
        ratio_mode=ratio,
        loss_agg_mode=aggregation,
        clip_mode=clip,
        clip_low=low,
        clip_high=high,
        clip_c=dual,
        loss_scale_factor=5.0,
    )
    assert distance(log_probs.grad, ours.gradient) <= 1e-12
    assert distance(theirs.per_token.detach(), ours.token_loss) <= 1e-12
    assert theirs.loss.item() == pytest.approx(ours.loss, rel=1e-12, abs=1e-12)
    sums = dict(zip(ours.stats, [*theirs.stats.sums.tolist(), *theirs.stats.maxima.tolist()], strict=True))
    assert sums == pytest.approx(ours.stats, rel=1e-11, abs=1e-11)


def test_gradient_is_the_derivative_of_the_loss() -> None:
    """Finite differences of the token ratio, where a token's loss depends on its own log-prob alone."""
    batch = without(random_batch(2, [12], spread=0.01, dtype=torch.float64), "loss_mask")
    batch["response_mask"] = torch.ones(12)
    batch["advantages"], batch["weights"] = torch.linspace(-1, 1, 12), torch.linspace(0.5, 2, 12)
    batch["log_probs"] = batch["old_log_probs"] = torch.linspace(-2, -1, 12).double()
    gradient = ctpo_loss_reference(**batch, ratio_mode="token").gradient
    step = 1e-6
    for i in range(12):
        moved = [batch["log_probs"].clone(), batch["log_probs"].clone()]
        moved[0][i] += step
        moved[1][i] -= step
        up, down = (ctpo_loss_reference(**{**batch, "log_probs": x}, ratio_mode="token").loss for x in moved)
        assert (up - down) / (2 * step) == pytest.approx(gradient[i], rel=1e-6, abs=1e-9)


def test_log_probs_equal_torch() -> None:
    logits = torch.randn(9, 14, dtype=torch.float64, requires_grad=True)
    labels, g = torch.randint(0, 11, (9,)), torch.randn(9, dtype=torch.float64)
    table = (logits[:, :11] / 0.7).log_softmax(1)
    log_probs = table.gather(1, labels[:, None]).squeeze(1)
    log_probs.backward(g)
    found = log_probs_reference(logits.detach(), labels, 0.7, 11, g)
    assert distance(log_probs.detach(), found.log_probs) <= 1e-12
    assert distance(-(table.exp() * table).sum(1).detach(), found.entropy) <= 1e-12
    assert distance(logits.grad, found.d_logits) <= 1e-12


def test_log_probs_of_edge_rows() -> None:
    inf = math.inf
    found = log_probs_reference(
        [[0.0, 0.0], [-inf, 1.0], [-inf, -inf], [math.nan, 0.0], [3.0, 1.0]], [0, 1, 0, 1, -100]
    )
    assert found.log_probs[:2] == pytest.approx([-math.log(2), 0.0])
    assert found.entropy[:2] == pytest.approx([math.log(2), 0.0])
    assert math.isnan(found.log_probs[2])
    assert math.isnan(found.log_probs[3])
    assert found.log_probs[4] == 0
    assert found.d_logits[4] == [0.0, 0.0]


def test_linear_equals_autograd_through_torch() -> None:
    torch.manual_seed(3)
    hidden = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    labels, response = torch.randint(0, 5, (8,)), torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    log_probs = (hidden @ weight[:5].T / 1.5).log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    old = (log_probs - 0.01).detach()
    output = policy_loss(
        log_probs, old, torch.tensor([1.0, -2.0]), response, PolicyObjective(), cu_seqlens=torch.tensor([0, 5, 8])
    )
    output.loss.backward()
    found = linear_ctpo_reference(
        hidden.detach(),
        weight.detach(),
        labels,
        old,
        response,
        [1.0, -2.0],
        [0, 5, 8],
        temperature=1.5,
        vocab_size=5,
    )
    assert found.loss.loss == pytest.approx(output.loss.item(), rel=1e-12)
    assert distance(hidden.grad, found.d_hidden) <= 1e-12
    assert distance(weight.grad, found.d_weight) <= 1e-12


def test_unknown_modes_are_refused() -> None:
    for name in ("ratio_mode", "clip_mode", "loss_agg_mode"):
        with pytest.raises(KeyError):
            ctpo_loss_reference([0.0], [0.0], [1], [1.0], [0, 1], **{name: "x"})
