"""The two losses that a policy step can take, bound to packed micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import (
    Denominators,
    PolicyLossOutput,
    PolicyObjective,
    policy_loss,
    supervised_loss,
)

LossFunction = Callable[[torch.Tensor, PackedBatch, Denominators], PolicyLossOutput]
"""(logp [N], micro-batch, denominators of the whole optimizer step) -> the loss share of this micro-batch."""


def policy_gradient(objective: PolicyObjective, anchor: Literal["proximal", "behaviour"]) -> LossFunction:
    """The RL loss. proximal: ratios against the trainer's anchor pass; behaviour: against what the sampler reported."""

    def loss(logp: torch.Tensor, batch: PackedBatch, denominators: Denominators) -> PolicyLossOutput:
        reference = batch.anchor_logp if anchor == "proximal" else batch.behaviour_logp
        if reference is None:
            raise ValueError("the proximal anchor needs Policy.anchor() before Policy.update()")
        return policy_loss(
            logp,
            reference,
            batch.advantages,
            batch.model_mask,
            objective,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.cu_seqlens,
            denominators=denominators,
        )

    return loss


def supervised() -> LossFunction:
    """Negative log-likelihood of the warm-up's assistant tokens."""

    def loss(logp: torch.Tensor, batch: PackedBatch, denominators: Denominators) -> PolicyLossOutput:
        return supervised_loss(logp, batch.loss_mask, denominators)

    return loss
