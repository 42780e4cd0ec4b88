"""An optimizer step of a small policy, and the weights before and after it."""

from __future__ import annotations

import torch

from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import MiniBatch, Trainer, Update, policy_gradient
from tests.policy import models

CTPO = PolicyObjective.preset("ctpo")
LOSS = policy_gradient(CTPO, "proximal")


def scored(policy: Trainer, seed: int = 0, advantages: list[float] | None = None) -> MiniBatch:
    """One mini-batch of all 16 recorded trajectories, with old log-probs."""
    given = models.advantages() if advantages is None else advantages
    (mini_batch,) = policy.distribute(models.trajectories(seed=seed), given, size=16)
    policy.compute_old_log_probs([mini_batch])
    return mini_batch


def step(policy: Trainer, seed: int = 0, advantages: list[float] | None = None) -> Update:
    """An optimizer step on them by CTPO."""
    return policy.update(scored(policy, seed, advantages), LOSS)


def weights(policy: Trainer) -> dict[str, torch.Tensor]:
    """A copy of the full weights, by name."""
    return {name: tensor.clone() for name, tensor in policy.weights()}


def has_weights(policy: Trainer, expected: dict[str, torch.Tensor]) -> bool:
    """Whether the full weights are these, bit for bit."""
    return all(torch.equal(tensor, expected[name]) for name, tensor in policy.weights())
