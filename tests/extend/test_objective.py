"""examples/objective: an objective from a file outside of the package, against what its formula says."""

from __future__ import annotations

import pytest
import torch

from ctpo_megatron.objective import (
    Denominators,
    ObjectiveInputs,
    function_loss,
    load_objective,
    objective_from_config,
    summarize,
)
from tests.extend.scripted import project


def test_the_loss_is_that_of_the_formula() -> None:
    config = project("objective").objective
    assert config.function is not None
    torch.manual_seed(0)
    log_probs = (0.3 * torch.randn(6)).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, -2.0])
    mask = torch.tensor([False, True, True, False, True, True])
    inputs = ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=torch.zeros(6),
        rollout_log_probs=torch.zeros(6),
        advantages=advantages,
        response_mask=mask,
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, 3, 6]),
        denominators=Denominators(2, 2, 4),
    )
    output = function_loss(load_objective(config.function), inputs, objective_from_config(config))
    expected = (-advantages * (0.1 * torch.tanh(log_probs / 0.1)).exp())[mask].sum() / 4
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(output.loss, log_probs)
    assert (gradient[mask] != 0).all() and not gradient[~mask].any()
    metrics = summarize(output.stats)
    assert metrics["objective/log_ratio_abs"] == pytest.approx(log_probs.detach().abs()[mask].mean().item(), rel=1e-6)
