"""Every preset on kernels: the loss from hidden states is that of their log-probs, and that of the torch form."""

from __future__ import annotations

import pytest
import torch

from ctpo_kernels import SUMS
from ctpo_megatron.objective import PRESETS, Denominators, PolicyObjective, linear_policy_loss, policy_loss, summarize
from ctpo_megatron.objective.ratios import LossTokens, SequenceBounds, objective_ratios
from ctpo_megatron.objective.surrogate import surrogate
from tests.objective.objective_reference import packed, random_batch

ON_KERNELS = [name for name in PRESETS if PolicyObjective.preset(name).on_kernels]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEP = Denominators(sequences=9, trained_sequences=5, tokens=40)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_linear_policy_loss_equals_the_loss_of_its_log_probs(name: str) -> None:
    torch.manual_seed(0)
    objective = PolicyObjective.preset(name)
    batch = packed(random_batch(5, [6, 0, 17, 1, 9], 0.1))
    n = batch["log_probs"].numel()
    hidden = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 27, (n,))
    logits = hidden @ weight.T / 0.8
    log_probs = logits[:, :27].log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    batch |= {"old_log_probs": log_probs.detach() - (batch["log_probs"] - batch["old_log_probs"])}
    expected = policy_loss(**{**batch, "log_probs": log_probs}, objective=objective, denominators=STEP)
    gradients = torch.autograd.grad(expected.loss, (hidden, weight))

    rest = {name: value for name, value in batch.items() if name != "log_probs"}
    found = linear_policy_loss(
        hidden, weight, labels, objective=objective, denominators=STEP, temperature=0.8, vocab_size=27, **rest
    )
    torch.testing.assert_close(found.loss, expected.loss, **EXACT)
    for ours, theirs in zip(torch.autograd.grad(found.loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)
    model = batch["response_mask"] != 0
    torch.testing.assert_close(found.log_probs, torch.where(model, log_probs, 0.0).detach(), **EXACT)
    assert summarize(found.stats) == pytest.approx(summarize(expected.stats), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", ON_KERNELS)
def test_the_torch_form_equals_the_kernels(name: str) -> None:
    """Token losses and clips; statistics by position take the clips from the torch form."""
    objective = PolicyObjective.preset(name)
    batch = packed(random_batch(4, [4, 0, 1, *[3] * 40], 1.5))
    expected = policy_loss(**batch, objective=objective)
    layout = SequenceBounds.of(batch["log_probs"], batch["cu_seqlens"])
    model, trained = layout.masks(batch["response_mask"], batch["loss_mask"])
    tensors = (batch["log_probs"], batch["old_log_probs"], model, layout, None, torch.float64)
    current, anchor, ratios = objective_ratios(objective, *tensors)
    advantage = torch.where(trained, batch["advantages"], 0.0)
    found = surrogate(ratios, LossTokens(current, anchor, advantage, model, trained, layout), objective)
    torch.testing.assert_close(torch.where(trained, found.loss * batch["weights"], 0.0), expected.per_token, **EXACT)
    sums = dict(zip(SUMS, expected.stats.sums.tolist(), strict=True))
    assert [int((side & trained).sum()) for side in (found.high, found.low, found.dual)] == [
        sums["clip_high"],
        sums["clip_low"],
        sums["clip_dual"],
    ]
    assert found.high.any()
