"""The correction, and CISPO's loss, on a GPU: what the host computes, and nothing read back."""

from __future__ import annotations

import pytest
import torch

from ctpo_megatron.objective import PolicyObjective, correct, policy_loss
from tests.objective.objective_reference import packed as packed_loss
from tests.objective.objective_reference import random_batch
from tests.objective.test_objective_correction import CONFIGS, multi_turn, packed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", CONFIGS)
def test_correction_equals_that_of_the_host(name: str) -> None:
    arguments = packed(multi_turn(3), torch.float32)
    expected = correct(CONFIGS[name], *arguments)
    there = [tensor.cuda() for tensor in arguments]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = correct(CONFIGS[name], *there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.loss_mask.cpu(), expected.loss_mask) and found.names == expected.names
    torch.testing.assert_close(found.table.cpu(), expected.table, rtol=1e-6, atol=1e-6)
    if expected.weights is not None:
        torch.testing.assert_close(found.weights.cpu(), expected.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", ["cispo", "dppo-tv"])
def test_a_loss_equals_that_of_the_host(preset: str) -> None:
    """One of the kernels, and one in torch."""
    arguments = packed_loss(random_batch(5, [20, 3, 40], 0.5), torch.float32)
    gradients = []
    for device in ("cpu", "cuda"):
        there = {name: tensor.to(device, copy=True) for name, tensor in arguments.items()}
        there["log_probs"].requires_grad_()
        policy_loss(**there, objective=PolicyObjective.preset(preset)).loss.backward()
        gradients.append(there["log_probs"].grad.cpu())
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
