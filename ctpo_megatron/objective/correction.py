"""Correction weights of the decoupled form: the ratio is against the proximal policy, w is proximal / behaviour."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ctpo_megatron.objective.ratios import prefix_sum, sequence_sum, token_log_ratio
from ctpo_megatron.objective.sequences import SequenceBounds

CorrectionKind = Literal["token", "sequence", "prefix"]


@torch.no_grad()
def correction_weights(
    kind: CorrectionKind,
    proximal_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    cap: float = 5.0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Truncated importance weights w_t, detached, in the shape of the inputs (`[B, T]`, or `[N]` with cu_seqlens).

    With d_t = proximal_t - behaviour_t over model tokens, |d_t| <= 20:

        token      min(cap, exp d_t)
        sequence   min(cap, exp sum_t d_t)      one weight for the whole sequence
        prefix     min(cap, exp sum_{k<=t} d_k) what happened up to t only: the causal form that fits CTPO

    1 where response_mask is 0. Feed the result to `policy_loss(weights=...)`.
    Raises ValueError for an unknown kind, a cap that is not a positive number, or shapes that do not fit.
    """
    if not (math.isfinite(cap) and cap > 0):
        raise ValueError(f"cap must be a positive number; got {cap}")
    layout = SequenceBounds.of(proximal_log_probs, cu_seqlens)
    dtype = proximal_log_probs.dtype if proximal_log_probs.dtype == torch.float64 else torch.float32
    model = layout.mask(response_mask, "response_mask")
    proximal = layout.values(proximal_log_probs, "proximal_log_probs", dtype)
    d = token_log_ratio(proximal, layout.values(rollout_log_probs, "rollout_log_probs", dtype), model)
    match kind:
        case "token":
            log_weight = d
        case "sequence":
            log_weight = sequence_sum(d, layout)
        case "prefix":
            log_weight = prefix_sum(d, layout)
        case _:
            raise ValueError(f"unknown correction {kind!r}; known: token, sequence, prefix")
    # Truncate in log space: exp of a long sum would overflow first.
    weight = log_weight.clamp(max=math.log(cap)).exp().to(dtype)
    return torch.where(model, weight, 1.0).reshape(layout.shape)
