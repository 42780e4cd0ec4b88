"""Supervised loss of SFT, with the aggregation of the policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ctpo_megatron.objective.aggregation import Denominators
from ctpo_megatron.objective.policy_loss import PolicyLossOutput
from ctpo_megatron.objective.stats import stats_of


def supervised_loss(log_probs: Tensor, loss_mask: Tensor, denominators: Denominators | None = None) -> PolicyLossOutput:
    """Mean negative log-likelihood over the loss tokens of the step: -(1 / tokens) sum_t l_t log_probs_t.

    log_probs (nats, differentiable), loss_mask: one shape, `[B, T]` or `[N]`; sequence boundaries do not matter; values
    at masked positions have no effect. denominators: counts of the whole step, or None for this batch alone.
    Raises ValueError when the shapes differ.
    """
    if log_probs.shape != loss_mask.shape:
        raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}; expected {tuple(log_probs.shape)}")
    trained = loss_mask.to(log_probs.device) != 0
    dtype = log_probs.dtype if log_probs.dtype == torch.float64 else torch.float32
    per_token = torch.where(trained, -log_probs.to(dtype), 0.0)
    tokens = trained.sum()
    loss = per_token.double().sum() / (tokens.clamp(min=1) if denominators is None else max(denominators.tokens, 1))
    stats = stats_of({"loss": loss, "loss_tokens": tokens}, kind="supervised")
    return PolicyLossOutput(loss.to(dtype), per_token, stats)
