"""Log importance ratios of tokens, and the clipped surrogate of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_kernels.names import RatioMode
from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.sequences import SequenceBounds

TOKEN_LOG_RATIO_LIMIT = 20.0
"""d_t is clamped to +- this (nats) before it enters a sum; the value is detached, so no gradient is lost."""

LOG_RATIO_CAP = 10.0
"""log r_t is capped at this (nats); beyond it the gradient is zero."""

FRACTION_BITS = 40
"""S_t is summed in integer units of 2^-40 nats."""


@dataclass(frozen=True)
class TokenRatios:
    """Log-ratios of a flat batch; every field is `[N]` and meaningful where response_mask is 1.

    log_ratio: log r_t before the upper cap, nats; d log_ratio_t / d log_probs_t = 1 and 0 for every other token.
    d: detached token log-ratio log_probs_t - anchor_t within +-20 nats; 0 where response_mask is 0.
    position: int64, model tokens of the sequence up to and including this one (t, from 1).
    """

    log_ratio: Tensor
    d: Tensor
    position: Tensor


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """d_t = clamp(log p_t - log p_old_t, -20, 20), detached, and exactly 0 where response_mask is 0, NaN included.

    All `[N]`; NaN in a model token stays NaN, an infinite difference becomes +-20.
    """
    d = (log_probs.detach() - old_log_probs.detach()).clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)
    return torch.where(response_mask, d, 0.0)


def _fixed_point(d: Tensor) -> tuple[Tensor, Tensor]:
    """d as int64 units of 2^-40 (round half to even; NaN as 0), and int64 NaN flags.

    |d| <= 20 uses 45 bits, so a sequence holds 2^18 tokens at the limit before 64 bits could overflow. The running sum
    over the batch may wrap: differences modulo 2^64 are still right.
    """
    bad = d.isnan()
    units = torch.round(torch.where(bad, 0.0, d).double() * 2.0**FRACTION_BITS).to(torch.int64)
    return units, bad.to(torch.int64)


def _nats(units: Tensor, bad: Tensor) -> Tensor:
    """Inverse of `_fixed_point` for a sum of units that contains `bad` NaN terms: float64."""
    return torch.where(bad > 0, torch.nan, units.double() * 2.0**-FRACTION_BITS)


def prefix_sum(d: Tensor, layout: SequenceBounds) -> Tensor:
    """S_t = sum_{k <= t} d_k within each sequence, float64 `[N]`, from `d` `[N]` that is 0 at masked tokens.

    Summed in 64-bit fixed point: integer addition is associative, so S_t has the same bits for any packing order,
    padding or batch composition. A NaN makes S NaN from its position to the end of its own sequence.
    """
    units, bad = _fixed_point(d)
    return _nats(layout.cumulative_sum(units), layout.cumulative_sum(bad))


def sequence_sum(d: Tensor, layout: SequenceBounds) -> Tensor:
    """S_T, the sum over each whole sequence broadcast to its tokens, float64 `[N]`; exact as `prefix_sum` is."""
    units, bad = _fixed_point(d)
    return layout.to_tokens(_nats(layout.total(units), layout.total(bad)))


def token_ratios(
    mode: RatioMode, log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, layout: SequenceBounds
) -> TokenRatios:
    """The log-ratio of every token: log r_t = sg[x_t] + log p_t - sg[log p_t], with x_t by `mode` (sg = stop-gradient)

        cumprod            S_t            prefix product of token ratios (CTPO)
        geomean            S_t / t        its geometric mean
        token              d_t            PPO, GRPO, DAPO
        sequence           S_T            product over the whole sequence
        sequence-geomean   S_T / T        its geometric mean (GSPO, in the token form of its authors)

    where T counts the model tokens of the sequence. All inputs are `[N]`; `log_probs` must be finite at masked tokens
    (the caller sets 0 there); other masked values have no effect.
    """
    d = token_log_ratio(log_probs, old_log_probs, response_mask)
    counts = response_mask.to(torch.int64)
    position = layout.cumulative_sum(counts)
    match mode:
        case "cumprod":
            x = prefix_sum(d, layout)
        case "geomean":
            x = prefix_sum(d, layout) / position.clamp(min=1)
        case "token":
            x = d
        case "sequence":
            x = sequence_sum(d, layout)
        case "sequence-geomean":
            x = sequence_sum(d, layout) / layout.to_tokens(layout.total(counts)).clamp(min=1)
        case _:
            raise ValueError(f"unknown ratio_mode {mode!r}")
    # log_probs - sg[log_probs] has the value 0 and the gradient 1, so no gradient reaches other tokens.
    return TokenRatios(log_ratio=x.to(log_probs.dtype) + (log_probs - log_probs.detach()), d=d, position=position)


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
) -> TokenDiagnostics:
    """Log-ratios and clip window of a padded `[B, T]` or packed `[N]` batch; arguments as for `policy_loss`.

    Bounds of a clip on r are given as their logarithms (a lower bound of 0 as -inf).
    """
    layout = SequenceBounds.of(log_probs, cu_seqlens)
    model = layout.mask(response_mask, "response_mask")
    current = torch.where(model, layout.values(log_probs, "log_probs", torch.float32), 0.0)
    anchor = layout.values(old_log_probs, "old_log_probs", torch.float32)
    ratios = token_ratios(objective.ratio_mode, current, anchor, model, layout)
    low, high, _ = window(ratios.position, current.dtype, objective)
    if objective.clip_mode != "log_power":
        low, high = low.clamp(min=0).log(), high.log()
    values = (ratios.log_ratio, low, high, prefix_sum(ratios.d, layout).float())
    return TokenDiagnostics(*(torch.where(model, value, 0.0).reshape(layout.shape) for value in values))
