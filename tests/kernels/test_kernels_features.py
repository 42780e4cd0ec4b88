"""Differentiable entropy, of log-probs and in the sweep, against float64 autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import ctpo_loss, fused_linear_ctpo, linear_log_probs, vocab_parallel_log_probs
from tests.kernels.heads import Head, random_head
from tests.kernels.packings import distance
from tests.kernels.reference import exact_log_probs
from tests.support.backends import use_backend
from tests.support.pairwise import pairwise

TOLERANCE = 5e-6
FORMS = {
    "temperature": [1.0, 0.7],
    "h": ["none", "some", "alone"],  # derivatives by the entropies
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of infinities


def upstreams(h: str, rows: int) -> tuple[Tensor, Tensor]:
    g, of_entropy = torch.randn(rows), torch.randn(rows)
    return g * (h != "alone"), of_entropy * (h != "none")


@pairwise({"backend": ["torch", "triton"], **FORMS, "dtype": [torch.float32, torch.bfloat16]}, indirect=["backend"])
def test_given_logits(backend: str, temperature: float, h: str, dtype: torch.dtype) -> None:
    """Small and large logits, columns of -inf, padding, a row without a label."""
    logits = (torch.randn(9, 24) * torch.logspace(-2, 1, 9)[:, None]).to(dtype)
    logits[2, 3:5], logits[:, 20:] = -math.inf, 50.0
    labels = torch.randint(5, 20, (9,))
    labels[4] = -100
    g, of_entropy = upstreams(h, 9)
    given, own = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = vocab_parallel_log_probs(given, labels, None, temperature, True, vocab_size=20)
    wanted = exact_log_probs(own, labels, temperature, 20)
    for values, reference in zip(found, wanted, strict=True):
        assert float((values.double() - reference).detach().abs().max()) <= TOLERANCE
    (gradient,) = torch.autograd.grad((found[0] * g + found[1] * of_entropy).sum(), given)
    (expected,) = torch.autograd.grad((wanted[0] * g + wanted[1] * of_entropy).sum(), own)
    # The interpreter cuts bfloat16 off where a device rounds.
    bound = TOLERANCE if dtype == torch.float32 else 2**-8 if backend == "torch" else 2**-7
    assert distance(gradient, expected.nan_to_num()) <= bound
    assert not gradient[:, 20:].any()


@pairwise({"backend": ["torch", "triton"], **FORMS, "masked": [False, True]}, indirect=["backend"])
def test_hidden_states(backend: str, temperature: float, h: str, masked: bool) -> None:
    operands = torch.randn(9, 6), torch.randn(13, 6)
    labels = torch.randint(0, 13, (9,))
    mask = torch.arange(9) % 3 != 1 if masked else None
    g, of_entropy = upstreams(h, 9)
    given = [x.clone().requires_grad_() for x in operands]
    own = [x.double().requires_grad_() for x in operands]
    found = linear_log_probs(*given, labels, None, False, temperature, True, 4, mask=mask)
    wanted = [x if mask is None else x * mask for x in exact_log_probs(own[0] @ own[1].T, labels, temperature)]
    for values, reference in zip(found, wanted, strict=True):
        assert float((values.double() - reference).detach().abs().max()) <= TOLERANCE
    gradients = torch.autograd.grad((found[0] * g + found[1] * of_entropy).sum(), given)
    expected = torch.autograd.grad((wanted[0] * g + wanted[1] * of_entropy).sum(), own)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert distance(gradient, reference) <= TOLERANCE


def exact_head(head: Head, coefficient: float, **keywords: Any) -> tuple[Tensor, ...]:
    """Loss with its entropy bonus, entropies and both gradients, by float64 autograd through all logits."""
    operands = head.hidden.double().requires_grad_(), head.weight.double().requires_grad_()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in head.batch.items()}
    labels = head.labels.clamp(min=0)
    log_probs, entropy = exact_log_probs(operands[0] @ operands[1].T, labels, head.temperature)
    with use_backend("torch"):
        loss, _ = ctpo_loss(log_probs=log_probs, **batch, **keywords)
        # Ratio 1, advantage -1, no clip: the loss is the sum of the shares, its gradient the share of each token.
        leaf = torch.zeros(len(labels), dtype=torch.float64, requires_grad=True)
        plain = {**batch, "old_log_probs": None, "advantages": -torch.ones_like(leaf)[None], "weights": None}
        shares = torch.autograd.grad(ctpo_loss(log_probs=leaf, **plain, **keywords)[0], leaf)[0]
    loss = loss - coefficient * (shares * entropy).sum()
    return loss.detach(), entropy.detach() * batch["response_mask"], *torch.autograd.grad(loss, operands)


@pairwise(
    {
        "backend": ["torch", "triton"],
        "coefficient": [0.0, 0.3],
        "ratio": ["cumprod", "sequence-geomean"],
        "mode": ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"],
    },
    indirect=["backend"],
)
def test_head(backend: str, coefficient: float, ratio: str, mode: str) -> None:
    head = random_head(3, [9, 0, 14, 3], width=6, vocab=13, temperature=0.8)
    keywords = {"ratio_mode": ratio, "loss_agg_mode": mode, "clip_low": 10.0, "clip_high": 10.0, "clip_c": None}
    given = [x.clone().requires_grad_() for x in (head.hidden, head.weight)]
    options = {"entropy_coef": coefficient, "return_entropy": True, "chunk_size": 7}
    arguments = {**head.arguments(), "hidden": given[0], "weight": given[1]}
    loss, stats, _, entropy = fused_linear_ctpo(**arguments, **keywords, **options)
    expected = exact_head(head, coefficient, **keywords)
    gradients = torch.autograd.grad(loss, given)
    loss = loss.detach()
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5, abs=1e-6)
    assert float((entropy.double() - expected[1]).abs().max()) <= TOLERANCE
    for gradient, reference in zip(gradients, expected[2:], strict=True):
        assert distance(gradient, reference) <= 2 * TOLERANCE
    assert (float(loss) == pytest.approx(float(stats.sums[0]))) == (coefficient == 0)


def test_entropy_alone_keeps_rows_without_a_policy_gradient(backend: str) -> None:
    """Tiles are left out where no row has any gradient, not where the policy has none."""
    head = random_head(4, [9, 5], width=6, vocab=13)
    head.batch["advantages"] = torch.zeros(14)
    hidden = head.hidden.clone().requires_grad_()
    loss, *_ = fused_linear_ctpo(**{**head.arguments(), "hidden": hidden}, entropy_coef=1.0)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(gradient.any(dim=1), head.batch["loss_mask"])
