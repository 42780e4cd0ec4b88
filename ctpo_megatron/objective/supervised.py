"""Supervised loss of the warm-up, on the same machinery as the policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

from ctpo_megatron.objective.aggregation import Denominators
from ctpo_megatron.objective.policy_loss import PolicyLossOutput
from ctpo_megatron.objective.stats import stats_of


def supervised_loss(logp: Tensor, loss_mask: Tensor, denominators: Denominators | None = None) -> PolicyLossOutput:
    """Mean negative log-likelihood over the loss tokens of the step: -(1 / tokens) sum_t l_t logp_t.

    logp, loss_mask: one shape, any (`[B, T]` or `[N]`; sequence boundaries play no part). logp in nats, differentiable;
    values at masked positions never enter. denominators: counts of the whole step, or None for this batch alone.
    Raises ValueError when the shapes differ.
    """
    if logp.shape != loss_mask.shape:
        raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}; expected {tuple(logp.shape)}")
    trained = loss_mask.to(logp.device) != 0
    dtype = logp.dtype if logp.dtype == torch.float64 else torch.float32
    per_token = torch.where(trained, -logp.to(dtype), 0.0)
    tokens = trained.sum()
    loss = per_token.double().sum() / (tokens.clamp(min=1) if denominators is None else max(denominators.tokens, 1))
    stats = stats_of({"loss": loss, "loss_tokens": tokens}, kind="supervised")
    return PolicyLossOutput(loss.to(dtype), per_token, stats)
