"""Soft-cap, differentiable entropy and batches of `[B, T]`, each against float64 autograd or the packed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import ctpo_loss, fused_linear_ctpo, linear_log_probs, use_backend, vocab_parallel_log_probs
from tests.kernels.heads import Head, random_head
from tests.kernels.packings import distance, same_bits
from tests.kernels.reference import exact_log_probs
from tests.support.pairwise import pairwise

TOLERANCE = 5e-6
FORMS = {
    "cap": [None, 4.0, 30.0],
    "temperature": [1.0, 0.7],
    "h": ["none", "some", "alone"],  # derivatives by the entropies
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of infinities


def upstreams(h: str, rows: int) -> tuple[Tensor, Tensor]:
    g, of_entropy = torch.randn(rows), torch.randn(rows)
    return g * (h != "alone"), of_entropy * (h != "none")


@pairwise({"backend": ["torch", "triton"], **FORMS, "dtype": [torch.float32, torch.bfloat16]}, indirect=["backend"])
def test_given_logits(backend: str, cap: float | None, temperature: float, h: str, dtype: torch.dtype) -> None:
    """Logits small and large against the cap, columns of -inf, padding, a row without a label."""
    logits = (torch.randn(9, 24) * torch.logspace(-2, 1, 9)[:, None]).to(dtype)
    logits[2, 3:5], logits[:, 20:] = -math.inf, 50.0
    labels = torch.randint(5, 20, (9,))
    labels[4] = -100
    g, of_entropy = upstreams(h, 9)
    given, own = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found = vocab_parallel_log_probs(given, labels, None, temperature, True, vocab_size=20, softcap=cap)
    wanted = exact_log_probs(own, labels, temperature, 20, cap)
    for values, reference in zip(found, wanted, strict=True):
        assert float((values.double() - reference).detach().abs().max()) <= TOLERANCE
    (gradient,) = torch.autograd.grad((found[0] * g + found[1] * of_entropy).sum(), given)
    (expected,) = torch.autograd.grad((wanted[0] * g + wanted[1] * of_entropy).sum(), own)
    # The interpreter cuts bfloat16 off where a device rounds.
    bound = TOLERANCE if dtype == torch.float32 else 2**-8 if backend == "torch" else 2**-7
    assert distance(gradient, expected.nan_to_num()) <= bound
    assert not gradient[:, 20:].any()


@pairwise({"backend": ["torch", "triton"], **FORMS, "masked": [False, True]}, indirect=["backend"])
def test_hidden_states(backend: str, cap: float | None, temperature: float, h: str, masked: bool) -> None:
    operands = torch.randn(9, 6), torch.randn(13, 6)
    labels = torch.randint(0, 13, (9,))
    mask = torch.arange(9) % 3 != 1 if masked else None
    g, of_entropy = upstreams(h, 9)
    given = [x.clone().requires_grad_() for x in operands]
    own = [x.double().requires_grad_() for x in operands]
    found = linear_log_probs(*given, labels, None, False, temperature, True, 4, softcap=cap, mask=mask)
    wanted = [
        x if mask is None else x * mask for x in exact_log_probs(own[0] @ own[1].T, labels, temperature, None, cap)
    ]
    for values, reference in zip(found, wanted, strict=True):
        assert float((values.double() - reference).detach().abs().max()) <= TOLERANCE
    gradients = torch.autograd.grad((found[0] * g + found[1] * of_entropy).sum(), given)
    expected = torch.autograd.grad((wanted[0] * g + wanted[1] * of_entropy).sum(), own)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert distance(gradient, reference) <= TOLERANCE


def exact_head(head: Head, cap: float | None, coefficient: float, **keywords: Any) -> tuple[Tensor, ...]:
    """Loss with its entropy bonus, entropies and both gradients, by float64 autograd through all logits."""
    operands = head.hidden.double().requires_grad_(), head.weight.double().requires_grad_()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in head.batch.items()}
    labels = head.labels.clamp(min=0)
    log_probs, entropy = exact_log_probs(operands[0] @ operands[1].T, labels, head.temperature, None, cap)
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
        "cap": [None, 4.0],
        "coefficient": [0.0, 0.3],
        "ratio": ["cumprod", "sequence-geomean"],
        "mode": ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"],
    },
    indirect=["backend"],
)
def test_head(backend: str, cap: float | None, coefficient: float, ratio: str, mode: str) -> None:
    head = random_head(3, [9, 0, 14, 3], width=6, vocab=13, temperature=0.8)
    keywords = {"ratio_mode": ratio, "loss_agg_mode": mode, "clip_low": 10.0, "clip_high": 10.0, "clip_c": None}
    given = [x.clone().requires_grad_() for x in (head.hidden, head.weight)]
    options = {"softcap": cap, "entropy_coef": coefficient, "return_entropy": True, "chunk_size": 7}
    arguments = {**head.arguments(), "hidden": given[0], "weight": given[1]}
    loss, stats, _, entropy = fused_linear_ctpo(**arguments, **keywords, **options)
    expected = exact_head(head, cap, coefficient, **keywords)
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


def padded(seed: int) -> tuple[Head, dict[str, Tensor]]:
    """A head over 3 x 8 tokens, and its arguments in that shape."""
    head = random_head(seed, [8, 8, 8], width=6, vocab=13)
    shaped = {name: values.view(3, 8) for name, values in head.batch.items() if values.shape == (24,)}
    return head, {**shaped, "hidden": head.hidden.view(3, 8, 6), "labels": head.labels.view(3, 8)}


@pytest.mark.parametrize("values", ["one a token", "one a sequence", "a column"])
def test_padded_batches_have_the_bits_of_packed_ones(backend: str, values: str) -> None:
    head, shaped = padded(5)
    arguments = head.arguments()
    if values != "one a token":
        flat = torch.tensor([1.0, -0.5, 2.0])
        arguments |= {"advantages": flat, "weights": flat.abs()}
        shaped |= {
            name: arguments[name] if values == "one a sequence" else arguments[name][:, None]
            for name in ("advantages", "weights")
        }
    packed_operands, operands = (
        [x.clone().requires_grad_() for x in (h, head.weight)] for h in (head.hidden, shaped["hidden"])
    )
    packed = fused_linear_ctpo(**{**arguments, "hidden": packed_operands[0], "weight": packed_operands[1]})
    del arguments["cu_seqlens"]
    found = fused_linear_ctpo(**{**arguments, **shaped, "hidden": operands[0], "weight": operands[1]})
    assert same_bits(found[0], packed[0]) and same_bits(found[1], packed[1])
    assert same_bits(found[2], packed[2].view(3, 8))
    gradients = [torch.autograd.grad(out[0], given) for out, given in ((packed, packed_operands), (found, operands))]
    assert same_bits(gradients[1][0], gradients[0][0].view(3, 8, 6)) and same_bits(gradients[1][1], gradients[0][1])

    log_probs = linear_log_probs(shaped["hidden"], head.weight, head.labels.view(3, 8), mask=shaped["response_mask"])
    assert same_bits(log_probs, found[2])
    logits, labels = torch.randn(3, 8, 13), head.labels.clamp(min=0).view(3, 8)
    flat_logits = vocab_parallel_log_probs(logits.view(24, 13), labels.view(24))
    assert same_bits(vocab_parallel_log_probs(logits, labels), flat_logits.view(3, 8))


def test_padded_log_probs(backend: str) -> None:
    _, shaped = padded(6)
    tokens = {name: shaped[name] for name in ("response_mask", "advantages", "loss_mask", "weights")}
    log_probs = shaped["old_log_probs"].nan_to_num(-1.0).clone().requires_grad_()
    loss, stats, per_token = ctpo_loss(log_probs, log_probs.detach() - 0.01, **tokens, return_per_token=True)
    flat = {name: values.view(24) for name, values in tokens.items()}
    packed = log_probs.detach().view(24).requires_grad_()
    cu_seqlens = torch.tensor([0, 8, 16, 24])
    expected = ctpo_loss(packed, packed.detach() - 0.01, **flat, cu_seqlens=cu_seqlens, return_per_token=True)
    assert same_bits(loss, expected[0]) and same_bits(stats, expected[1])
    assert same_bits(per_token.view(torch.Size([24])), expected[2])
    gradients = torch.autograd.grad(loss, log_probs), torch.autograd.grad(expected[0], packed)
    assert same_bits(gradients[0][0], gradients[1][0].view(3, 8))


def test_refusals() -> None:
    head, shaped = padded(7)
    arguments = {**head.arguments(), **shaped}
    with pytest.raises(ValueError, match=r"packed \[N\] with cu_seqlens, or padded \[B, T\] without; got .*\[3, 8\]"):
        fused_linear_ctpo(**arguments)
    del arguments["cu_seqlens"]
    with pytest.raises(ValueError, match=r"labels has shape \[24\]; expected \[3, 8\]"):
        fused_linear_ctpo(**{**arguments, "labels": head.labels})
    with pytest.raises(ValueError, match=r"sequence_parallel: give this rank's rows as hidden \[N / tp, H\]"):
        fused_linear_ctpo(**arguments, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"advantages has shape \[8\]; expected \[3, 8\] or \[3\] or \[3, 1\]"):
        fused_linear_ctpo(**{**arguments, "advantages": torch.ones(8)})
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="softcap must be positive and finite, or None; got"):
            fused_linear_ctpo(**arguments, softcap=cap)
