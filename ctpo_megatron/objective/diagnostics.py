"""What reports draw of each token: its log-ratio, and the bounds of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.ratios import objective_ratios, prefix_sum
from ctpo_megatron.objective.sequences import SequenceBounds
from ctpo_megatron.objective.surrogate import window


@dataclass(frozen=True)
class TokenDiagnostics:
    """log r_t of the objective, its bounds, and S_t whatever the objective's ratio is; nats.

    Each is shaped like log_probs, 0 where response_mask is 0.
    """

    log_ratio: Tensor
    low: Tensor
    high: Tensor
    prefix: Tensor


@torch.no_grad()
def token_diagnostics(
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    objective: PolicyObjective,
    *,
    cu_seqlens: Tensor | None = None,
    turn: Tensor | None = None,
) -> TokenDiagnostics:
    """Log-ratios and clip window of a padded `[B, T]` or packed `[N]` batch; arguments as for `policy_loss`.

    Bounds of a clip on r are given as their logarithms (a lower bound of 0 as -inf). Infinite where `clip_mode` does
    not bound the log-ratio of a token. Of `token_log` it is the log-ratio before its tokens are bounded.
    """
    layout = SequenceBounds.of(log_probs, cu_seqlens)
    model = layout.mask(response_mask, "response_mask")
    current = torch.where(model, layout.values(log_probs, "log_probs", torch.float32), 0.0)
    anchor = layout.values(old_log_probs, "old_log_probs", torch.float32)
    turns = None if turn is None else layout.values(turn, "turn", turn.dtype)
    ratios = objective_ratios(objective, current, anchor, model, layout, turns)
    low, high, _ = window(ratios.reach, current.dtype, objective)
    if objective.clip_mode in ("ratio", "detached_ratio"):
        low, high = low.clamp(min=0).log(), high.log()
    values = (ratios.log_ratio, low, high, prefix_sum(ratios.d, layout).float())
    return TokenDiagnostics(*(torch.where(model, value, 0.0).reshape(layout.shape) for value in values))
