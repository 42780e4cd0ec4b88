"""The clipped surrogate: log-space bounds that widen with position (CTPO), and ratio bounds (PPO and relatives)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.ratios import LOG_RATIO_CAP


@dataclass(frozen=True)
class Surrogate:
    """Loss per token and where a bound replaced the ratio (so that the token has no gradient).

    loss: `[N]`, before weights and aggregation, in units of the advantage.
    ratio: `[N]`, detached r_t after the cap.
    high, low, dual: bool `[N]`. high: A > 0 and r above its bound; low: A < 0 and r below; dual: A < 0 and r far above.
        With clip_mode "detached_ratio" the sign of A does not matter, and a clipped token keeps the gradient of the
        bounded ratio.
    """

    loss: Tensor
    ratio: Tensor
    high: Tensor
    low: Tensor
    dual: Tensor


def capped(x: Tensor, upper: float) -> Tensor:
    """min(x, upper) whose gradient is 1 up to and including the bound and 0 beyond it.

    Not `torch.clamp`: that gives NaN a zero gradient, which would hide a NaN from the optimizer; not `torch.minimum`:
    that halves the gradient at an exact tie.
    """
    return torch.where(x > upper, upper, x)


def window(position: Tensor, dtype: torch.dtype, objective: PolicyObjective) -> tuple[Tensor, Tensor, Tensor | None]:
    """The low, high and dual bound at each position (int64 `[N]`, from 1); dual is None where it is off.

    They bound log r for clip_mode "log_power" and r for the others.
    """
    if objective.clip_mode == "log_power":
        scale = position.clamp(min=1).to(dtype) ** objective.clip_power
        dual = None if objective.clip_c is None else objective.clip_c * scale
        return -objective.clip_low * scale, objective.clip_high * scale, dual
    one = torch.ones_like(position, dtype=dtype)
    dual = None if objective.clip_c is None else objective.clip_c * one
    return (1 - objective.clip_low) * one, (1 + objective.clip_high) * one, dual


def surrogate(
    log_ratio: Tensor, position: Tensor, advantages: Tensor, objective: PolicyObjective, log_probs: Tensor
) -> Surrogate:
    """Clipped policy-gradient loss per token. All inputs `[N]`, and finite wherever the caller will not use the result.

    With log r_t cut at 10 (zero gradient beyond) and s_t = t^power, clip_mode "log_power" is

        l1 = -A r_t
        l2 = -A exp(clamp(log r_t, -low s_t, high s_t))
        l  = max(l1, l2);   if A < 0 and dual is set:  l = min(l, -A exp(dual s_t))

    and clip_mode "ratio" the same with r_t bounded by [1 - low, 1 + high] and by dual. The max and min leave exactly
    one interval per sign of A, which is how the code computes it:

        A >= 0:  l = -A min(r, upper bound)
        A <  0:  l = -A min(max(r, lower bound), dual bound)

    Each bound is compared with the quantity that it limits (log r or r), so rounding of exp cannot change a decision. A
    ratio equal to a bound counts as inside it. clip_mode "detached_ratio" (CISPO, arXiv 2506.13585) is

        l  = -A sg[clamp(r_t, 1 - low, 1 + high)] log p_t
    """
    log_ratio = capped(log_ratio, LOG_RATIO_CAP)
    if objective.clip_mode == "detached_ratio":
        return _detached(log_ratio, advantages, objective, log_probs)
    x = log_ratio if objective.clip_mode == "log_power" else log_ratio.exp()
    low, high, dual = window(position, x.dtype, objective)
    is_high = (advantages > 0) & (x > high)
    is_low = (advantages < 0) & (x < low)
    is_dual = torch.zeros_like(is_low) if dual is None else (advantages < 0) & (x > dual)

    bounded = torch.where(is_high, high, torch.where(is_low, low, x))
    if dual is not None:
        bounded = torch.where(is_dual, dual, bounded)
    clipped_ratio = bounded.exp() if objective.clip_mode == "log_power" else bounded
    return Surrogate(-advantages * clipped_ratio, log_ratio.detach().exp(), is_high, is_low, is_dual)


def _detached(log_ratio: Tensor, advantages: Tensor, objective: PolicyObjective, log_probs: Tensor) -> Surrogate:
    ratio = log_ratio.detach().exp()
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    is_high, is_low = (advantages != 0) & (ratio > high), (advantages != 0) & (ratio < low)
    return Surrogate(-advantages * ratio.clamp(low, high) * log_probs, ratio, is_high, is_low, torch.zeros_like(is_low))
