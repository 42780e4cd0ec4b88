"""The two losses that a policy step can take, bound to what the model predicts for a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ctpo_megatron.objective import Denominators, PolicyLossOutput, PolicyObjective, supervised_loss
from ctpo_megatron.policy.predictions import Predictions

LossFunction = Callable[[Predictions, Denominators], PolicyLossOutput]
"""(predictions of a micro-batch, denominators of the whole optimizer step) -> the loss share of this micro-batch."""


def policy_gradient(objective: PolicyObjective, anchor: Literal["proximal", "behaviour"]) -> LossFunction:
    """The RL loss. proximal: ratios against the trainer's anchor pass; behaviour: against what the sampler reported."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        targets = predictions.targets
        reference = targets.old_log_probs if anchor == "proximal" else targets.rollout_log_probs
        if reference is None:
            raise ValueError("the proximal anchor needs Policy.compute_old_log_probs() before Policy.update()")
        return predictions.policy_loss(reference, objective, denominators)

    return loss


def supervised() -> LossFunction:
    """Negative log-likelihood of SFT's assistant tokens."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        return supervised_loss(predictions.log_probs(), predictions.targets.loss_mask, denominators)

    return loss
