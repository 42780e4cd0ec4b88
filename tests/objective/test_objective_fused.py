"""The objective by the kernels equals the objective in plain torch: every preset, padded and packed, or from a head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctpo_kernels.names import LOSS_AGG_MODES
from ctpo_megatron.objective import PRESETS, Denominators, PolicyObjective, linear_policy_loss, policy_loss, summarize
from ctpo_megatron.objective.fused import fused_policy_loss
from ctpo_megatron.objective.sequences import SequenceBounds
from tests.objective.objective_reference import packed, padded, random_batch
from tests.objective.test_objective_loss import BATCHES, few, run

ON_KERNELS = [name for name in PRESETS if PolicyObjective.preset(name).on_kernels]
EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEP = Denominators(sequences=9, trained_sequences=5, tokens=40)


def fused(arguments: dict[str, Any], objective: PolicyObjective, denominators: Denominators | None) -> tuple:
    """(loss, token losses, stats, gradient) by the path that CUDA tensors take."""
    rest = {name: value for name, value in arguments.items() if name not in ("log_probs", "cu_seqlens")}
    log_probs = arguments["log_probs"].clone().requires_grad_()
    layout = SequenceBounds.of(log_probs, arguments.get("cu_seqlens"))
    loss, per_token, stats = fused_policy_loss(
        log_probs, objective=objective, layout=layout, denominators=denominators, **{"weights": None, **rest}
    )
    loss.backward()
    return loss, per_token, stats, log_probs.grad


@pytest.mark.parametrize("layout", [padded, packed])
@pytest.mark.parametrize("name", ON_KERNELS)
@given(
    **BATCHES,
    aggregation=st.sampled_from(LOSS_AGG_MODES),
    counted=st.booleans(),
    step=st.sampled_from([None, STEP]),
)
@few
def test_kernels_equal_plain_torch(layout, name, lengths, seed, spread, aggregation, counted, step):
    objective = PolicyObjective.preset(
        name, loss_agg_mode=aggregation, count_masked_sequences=counted, loss_scale_factor=7.0
    )
    arguments = layout(random_batch(seed, lengths, spread))
    expected, wanted = run(arguments, objective, denominators=step)
    loss, per_token, stats, gradient = fused(arguments, objective, step)
    torch.testing.assert_close(loss, expected.loss, **EXACT)
    torch.testing.assert_close(per_token, expected.per_token.detach(), **EXACT)
    torch.testing.assert_close(gradient, wanted, **EXACT)
    assert summarize(stats) == pytest.approx(summarize(expected.stats), rel=1e-9, abs=1e-9)


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
