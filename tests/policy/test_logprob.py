"""Log-probs and entropy against log_softmax, padded vocabulary and extreme values included."""

from __future__ import annotations

import pytest
import torch

from ctpo_megatron.policy.logprob import vocab_parallel_entropy, vocab_parallel_log_probs

ROWS, VOCAB, PADDED = 13, 301, 384


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("shift", [0.0, 80.0, -90.0])
def test_values_and_gradient_equal_log_softmax(temperature: float, shift: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(ROWS, PADDED) * 3 + shift).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,))
    weight = torch.randn(ROWS)
    found = vocab_parallel_log_probs(logits, labels, vocab_size=VOCAB, temperature=temperature)
    (gradient,) = torch.autograd.grad((found * weight).sum(), logits)

    double = logits.detach().double().requires_grad_()
    expected = (double[:, :VOCAB] / temperature).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), double)
    torch.testing.assert_close(found.double(), expected, atol=5e-6 * max(1, abs(shift) / 10), rtol=0)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-5, rtol=0)
    assert not gradient[:, VOCAB:].any()  # padding columns neither give nor take


def test_entropy_equals_the_definition() -> None:
    torch.manual_seed(1)
    logits = torch.randn(ROWS, PADDED) * 4
    logits[0] = 0.0
    expected = torch.distributions.Categorical(logits=logits[:, :VOCAB].double()).entropy()
    found = vocab_parallel_entropy(logits, vocab_size=VOCAB)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_low_precision_logits_are_evaluated_in_fp32() -> None:
    torch.manual_seed(2)
    logits = torch.randn(ROWS, VOCAB).bfloat16()
    labels = torch.randint(0, VOCAB, (ROWS,))
    found = vocab_parallel_log_probs(logits, labels, vocab_size=VOCAB)
    assert found.dtype == torch.float32
    expected = logits.double().log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=0)
