"""The losses of an optimizer step, as functions of the model's predictions for a micro-batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from ctpo_megatron.config import ObjectiveConfig
from ctpo_megatron.objective import (
    Denominators,
    Objective,
    ObjectiveInputs,
    PolicyLossOutput,
    PolicyObjective,
    function_loss,
    load_objective,
    objective_from_config,
    supervised_loss,
)
from ctpo_megatron.policy.context import Targets
from ctpo_megatron.policy.predictions import Predictions, with_rows

log = logging.getLogger(__name__)

Anchor = Literal["proximal", "behaviour", "decoupled"]

LossFunction = Callable[[Predictions, Denominators], PolicyLossOutput]
"""(predictions of a micro-batch, denominators of the whole optimizer step) -> the loss share of this micro-batch."""


def configured_loss(config: ObjectiveConfig) -> LossFunction:
    """The RL loss of a configuration: its preset with overrides, or the user's `objective.function`.

    Raises ExtensionError when that cannot be found or called; `extensions.activate` comes first.
    """
    objective = objective_from_config(config)
    if config.function is not None or not objective.on_kernels:
        log.info(
            "objective: %s, given log-probs of the model; the one-sweep head does not support it, so the output layer "
            "is computed a second time in the backward pass (policy.head=streaming)",
            config.function or config.preset,
        )
    if config.function is None:
        return policy_gradient(objective, config.anchor)
    return function_gradient(load_objective(config.function), objective, config.anchor)


def policy_gradient(objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """The RL loss. proximal: ratios against the trainer's old log-probs; behaviour: against the sampler's.

    decoupled: as proximal; the weights of `apply_correction` account for the difference between the two. In a
    micro-batch that is `on_policy`, the old log-probs are the log-probs of the pass itself.
    """

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        return predictions.policy_loss(_anchor(predictions.targets, anchor), objective, denominators)

    return loss


def function_gradient(function: Objective, objective: PolicyObjective, anchor: Anchor) -> LossFunction:
    """The RL loss by a user's function; `objective` says how its token losses are aggregated."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        targets, log_probs = predictions.targets, predictions.log_probs()
        old_log_probs = _anchor(targets, anchor)
        inputs = ObjectiveInputs(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
            rollout_log_probs=targets.rollout_log_probs,
            advantages=targets.advantages,
            response_mask=targets.response_mask,
            loss_mask=targets.loss_mask,
            weights=targets.weights,
            cu_seqlens=targets.cu_seqlens,
            denominators=denominators,
        )
        return with_rows(predictions, function_loss(function, inputs, objective), log_probs)

    return loss


def _anchor(targets: Targets, anchor: Anchor) -> Tensor | None:
    """The denominator of the ratios; None: the log-probs of the pass itself."""
    found = targets.rollout_log_probs if anchor == "behaviour" else targets.old_log_probs
    if found is None and not targets.on_policy:
        raise ValueError(f"the {anchor} anchor needs Trainer.compute_old_log_probs() before Trainer.update()")
    return found


def supervised() -> LossFunction:
    """Negative log-likelihood of the assistant tokens of SFT."""

    def loss(predictions: Predictions, denominators: Denominators) -> PolicyLossOutput:
        log_probs = predictions.log_probs()
        return with_rows(
            predictions, supervised_loss(log_probs, predictions.targets.loss_mask, denominators), log_probs
        )

    return loss
