"""`fused_linear_ctpo` against the float64 reference and against autograd through all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ctpo_kernels import fused_linear_ctpo, linear_log_probs
from tests.kernels.heads import Head, Swept, eager, random_head, sweep
from tests.kernels.packings import assert_stats, distance, dyadic, same_bits
from tests.kernels.reference import linear_ctpo_reference

RATIOS = ["cumprod", "geomean", "token", "sequence", "sequence-geomean"]


def assert_swept(found: Swept, head: Head, **keywords: Any) -> None:
    """Against the reference: 1e-12 in float64; in float32 5e-6 on log-probs (nats) and gradients (Frobenius)."""
    expected = linear_ctpo_reference(**head.arguments(), **keywords)
    tolerance = 1e-12 if head.hidden.dtype == torch.float64 else 5e-6
    assert float((found.log_probs.double() - expected.log_probs).abs().max()) <= tolerance
    assert distance(found.d_hidden, expected.d_hidden) <= tolerance
    assert distance(found.d_weight, expected.d_weight) <= tolerance
    size = max(1.0, sum(abs(x) for x in expected.loss.gradient))
    assert abs(float(found.loss) - expected.loss.loss) <= 4 * tolerance * size
    # S_t carries the error of every log-prob before it.
    assert_stats(found.stats, expected.loss.stats, 5e-11 if tolerance < 1e-9 else 2e-4)


@pytest.mark.parametrize("chunk", [1, 16, 50, None])
@pytest.mark.parametrize("ratio", RATIOS)
def test_float64_twin(ratio: str, chunk: int | None) -> None:
    head = random_head(1, padded=4, temperature=0.8, padding=3).double()
    assert_swept(sweep(head, ratio_mode=ratio, chunk_size=chunk), head, ratio_mode=ratio)


@pytest.mark.parametrize(("ratio", "chunk"), [("cumprod", 16), ("cumprod", None), ("geomean", 7), ("sequence", 16)])
def test_float32(backend: str, ratio: str, chunk: int | None) -> None:
    head = random_head(3, padded=5, temperature=0.8, padding=2)
    assert_swept(sweep(head, ratio_mode=ratio, chunk_size=chunk), head, ratio_mode=ratio)


@pytest.mark.parametrize(
    ("lengths", "vocab", "width"),
    [([1], 5, 3), ([0, 0, 1, 0], 17, 1), ([12, 3], 1, 4), ([130, 129], 131, 7), ([5, 5, 5, 5], 16, 16)],
)
def test_shapes(backend: str, lengths: list[int], vocab: int, width: int) -> None:
    head = all_labelled(random_head(4, lengths, vocab=vocab, width=width))
    head.batch["response_mask"] |= torch.rand(sum(lengths)) < 0.5 if sum(lengths) > 20 else True
    assert_swept(sweep(head, chunk_size=100), head)


def all_labelled(head: Head) -> Head:
    """With numbers and labels in masked rows too."""
    head.batch = {k: v.nan_to_num(-1.0) if v.is_floating_point() else v for k, v in head.batch.items()}
    head.labels.clamp_(min=0)
    return head


@pytest.mark.parametrize("response", [True, False])
def test_all_or_no_rows_are_responses(backend: str, response: bool) -> None:
    head = all_labelled(random_head(5, [20, 12]))
    head.batch["response_mask"] = torch.full((32,), response)
    found = sweep(head)
    assert_swept(found, head)
    assert bool(found.d_weight.any()) == response


ONE_EACH = torch.tensor([1.0, 2.0, -1.5, 0.5, 0.0, 1.0])
FORMS = {
    "on policy": {"old_log_probs": None},
    "without mask and weights": {"loss_mask": None, "weights": None},
    "an advantage a sequence": {"advantages": ONE_EACH},
    "a weight a sequence": {"weights": ONE_EACH},
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_batch(backend: str, form: str) -> None:
    head = random_head(6)
    head.batch |= FORMS[form]
    found = sweep(head, chunk_size=16)
    assert_swept(found, head)
    assert form != "on policy" or found.stats.maxima.tolist() == [1.0, -1.0, 0.0]


def test_log_probs_are_those_of_linear_log_probs_to_the_bit(backend: str) -> None:
    head = random_head(9, padded=3, temperature=0.9)
    found = sweep(head, chunk_size=16)
    own = {"hidden": head.hidden, "weight": head.weight, "labels": head.labels, "mask": head.batch["response_mask"]}
    same = linear_log_probs(**own, temperature=0.9, chunk_size=16, vocab_size=head.vocab_size)
    assert same_bits(found.log_probs, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_operands(backend: str, dtype: torch.dtype) -> None:
    """At most twice the error of a torch run with the same operands and float32 accumulation."""
    head = random_head(11, [40, 31], width=24, vocab=70, padded=2, dtype=dtype)
    exact, plain = eager(head.double()), eager(head)
    for chunk in (None, 16):
        found = sweep(head, chunk_size=chunk)
        assert found.d_hidden.dtype == found.d_weight.dtype == dtype
        assert found.log_probs.dtype == found.loss.dtype == torch.float32
        assert float((found.log_probs.double() - exact.log_probs).abs().max()) <= 5e-6
        for name in ("d_hidden", "d_weight"):
            allowed = 2 * distance(getattr(plain, name), getattr(exact, name))
            assert distance(getattr(found, name), getattr(exact, name)) <= allowed


@pytest.mark.parametrize("chunks", [pytest.param((1, 3), marks=pytest.mark.slow), (16, 64), (29, None)])
def test_chunks_leave_integers_and_decisions(backend: str, chunks: tuple[int | None, int | None]) -> None:
    """Hidden states that make every logit exact: log-probs then have the same bits however the product is cut."""
    head = random_head(12, width=4)
    head.hidden, head.weight = dyadic(head.hidden), dyadic(head.weight / 64)
    head.weight = torch.round(head.weight * 64) / 64
    head.hidden = torch.round(head.hidden * 4) / 4
    found = [sweep(head, chunk_size=chunk) for chunk in chunks]
    assert same_bits(found[0].log_probs, found[1].log_probs)
    assert same_bits(found[0].d_hidden, found[1].d_hidden)
    assert same_bits(found[0].stats.maxima, found[1].stats.maxima)
    counts = [1, 2, 3, 6, 7, 8, 9]
    assert same_bits(found[0].stats.sums[counts], found[1].stats.sums[counts])
    assert distance(found[0].d_weight, found[1].d_weight.double()) <= 5e-6


def test_masked_rows_never_enter(backend: str) -> None:
    head = random_head(14)
    expected = sweep(head)
    masked = ~head.batch["response_mask"]
    head.hidden[masked] = torch.nan
    head.labels[masked] = 10**9
    found = sweep(head)
    assert same_bits(found, expected)
    assert not found.d_hidden[masked].any()
    assert not found.log_probs[masked].any()


def test_ignored_label_among_the_responses(backend: str) -> None:
    head = random_head(15, [20, 10])
    row = int(head.batch["response_mask"].nonzero()[3])
    head.labels[row] = -100
    found = sweep(head)
    assert_swept(found, head)
    assert not found.d_hidden[row].any()
    assert float(found.log_probs[row]) == 0


@pytest.mark.parametrize("upstream", [1 / 3, 0.1])
def test_upstream_scalar_is_not_rounded_to_the_dtype_of_the_operands(backend: str, upstream: float) -> None:
    """In bfloat16 1/3 is 0.2 % too large: hidden states and weight would learn at different rates."""
    head = random_head(9, [30, 20], dtype=torch.bfloat16)
    gradients = []
    for scale in (1.0, upstream):
        operands = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
        loss, _, _ = fused_linear_ctpo(**{**head.arguments(), "hidden": operands[0], "weight": operands[1]})
        gradients.append(torch.autograd.grad(loss * scale, operands))
    (d_hidden, d_weight), (scaled_d_hidden, scaled_d_weight) = gradients
    assert same_bits(scaled_d_hidden, (d_hidden.float() * torch.tensor(upstream)).bfloat16())
    assert distance(scaled_d_weight, upstream * d_weight.double()) <= 2**-8
