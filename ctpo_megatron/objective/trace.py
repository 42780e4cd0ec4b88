"""The log-ratio of every token beside the window that may clip it: what a person looks at, never part of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.clips import window
from ctpo_megatron.objective.layout import SequenceLayout
from ctpo_megatron.objective.ratios import token_ratios


@dataclass(frozen=True)
class RatioTrace:
    """log_ratio, low, high: log r_t and its bounds (nats), each in the shape of logp, 0 where model_mask is 0."""

    log_ratio: Tensor
    low: Tensor
    high: Tensor


@torch.no_grad()
def ratio_trace(
    logp: Tensor,
    anchor_logp: Tensor,
    model_mask: Tensor,
    objective: PolicyObjective,
    *,
    cu_seqlens: Tensor | None = None,
) -> RatioTrace:
    """Log-ratios and clip window of a padded `[B, T]` or packed `[N]` batch; arguments as for `policy_loss`.

    Bounds of a clip on r are given as their logarithms (a lower bound of 0 as -inf).
    """
    layout = SequenceLayout.of(logp, cu_seqlens)
    model = layout.mask(model_mask, "model_mask")
    current = torch.where(model, layout.values(logp, "logp", torch.float32), 0.0)
    anchor = layout.values(anchor_logp, "anchor_logp", torch.float32)
    ratios = token_ratios(objective.ratio, current, anchor, model, layout)
    low, high, _ = window(ratios.position, current.dtype, objective)
    if objective.clip == "ratio":
        low, high = low.clamp(min=0).log(), high.log()
    fields = (torch.where(model, value, 0.0).reshape(layout.shape) for value in (ratios.log_ratio, low, high))
    return RatioTrace(*fields)
