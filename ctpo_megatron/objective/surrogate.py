"""The surrogate loss of a token: its ratio, clipped, gated or taken out of the loss, times the advantage."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective, PrefixBudget
from ctpo_megatron.objective.mismatch import per_sequence
from ctpo_megatron.objective.ratios import (
    LOG_RATIO_CAP,
    LossTokens,
    SequenceBounds,
    TokenRatios,
    TurnEnds,
    objective_ratios,
    prefix_sum,
    sequence_sum,
    token_ratios,
)

SMALLEST_REST = 1e-8
"""Added to 1 - p and 1 - mu in the KL divergence, as the authors of DPPO do (verl, `compute_policy_loss_dppo_kl`)."""

LARGEST_K3 = 1_000.0
"""Larger estimates count as this in the mean over a sequence: the fixed point of a sum would overflow."""


@dataclass(frozen=True)
class Surrogate:
    """Loss per token and where a bound replaced the ratio (so that the token has no gradient).

    loss: `[N]`, before weights and aggregation, in units of the advantage.
    ratio: `[N]`, detached r_t after the cap.
    high, low, dual: bool `[N]`. high: A > 0 and r above its bound; low: A < 0 and r below; dual: A < 0 and r far above.
        With clip_mode "detached_ratio" the sign of A does not matter, and a clipped token keeps the gradient of the
        bounded ratio. Tokens that a trust region takes out of the loss are high for A > 0 and low for A < 0. There,
        dual are tokens whose ratio is truncated, for either sign.
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
    """Return the low, high and dual bound at each position (int64 `[N]`, from 1); dual is None where it is off.

    They bound log r for clip_mode "log_power", around -t s2 / 2 with `clip_drift` s2, and r for "ratio" and
    "detached_ratio". Other modes bound neither: -inf and inf.
    """
    if objective.clip_mode == "log_power":
        scale = position.clamp(min=1).to(dtype) ** objective.clip_power
        dual = None if objective.clip_c is None else objective.clip_c * scale
        low, high = -objective.clip_low * scale, objective.clip_high * scale
        if not objective.clip_drift:
            return low, high, dual
        centre = -objective.clip_drift / 2 * position.to(dtype)
        return low + centre, high + centre, None if dual is None else dual + centre
    one = torch.ones_like(position, dtype=dtype)
    if objective.clip_mode not in ("ratio", "detached_ratio"):
        return -math.inf * one, math.inf * one, None
    dual = None if objective.clip_c is None else objective.clip_c * one
    return (1 - objective.clip_low) * one, (1 + objective.clip_high) * one, dual


def surrogate(ratios: TokenRatios, tokens: LossTokens, objective: PolicyObjective) -> Surrogate:
    """Policy-gradient loss per token by `clip_mode`; the result means nothing where `tokens.trained` is False.

    With log r_t cut at 10 (zero gradient beyond) and s_t = t^power, clip_mode "log_power" is

        l1 = -A r_t
        l2 = -A exp(clamp(log r_t, -low s_t, high s_t))
        l  = max(l1, l2);   if A < 0 and dual is set:  l = min(l, -A exp(dual s_t))

    and clip_mode "ratio" the same with r_t bounded by [1 - low, 1 + high] and by dual. The others, with x_t as in
    `token_ratios`, p_t and mu_t the probabilities under policy and anchor, and M_t = 0 outside of a `trust_region`:

        detached_ratio           l = -A sg[clamp(r_t, 1 - low, 1 + high)] log p_t        CISPO, arXiv 2506.13585
        sigmoid                  l = -A (4 / tau) sigmoid(tau (r_t - 1)), tau by the sign of A    SAPO, arXiv 2511.20347
        token_log                l = -A r_t with x_t of the bounded d_t: at most high for A > 0, at least -low for A < 0
                                 (GMPO, arXiv 2507.20673, in the own-token form)
        binary_tv, binary_kl     l = -A sg[min(r_t, c)] log p_t M_t                      DPPO, arXiv 2602.04879
        prefix_tv, sequence_k3   l = -A r_t M_t              CPPO, arXiv 2606.10968, and TRM, arXiv 2512.23075

    With ratios at the ends of turns the loss is a sum over turns, see `_of_turns`.
    """
    if ratios.ends is not None:
        return _of_turns(ratios, ratios.ends, tokens, objective)
    log_ratio = capped(torch.where(tokens.trained, ratios.log_ratio, 0.0), LOG_RATIO_CAP)
    match objective.clip_mode:
        case "log_power" | "ratio":
            return _clipped(log_ratio, ratios.position, tokens.advantage, objective)
        case "detached_ratio":
            return _detached(log_ratio, tokens, objective)
        case "sigmoid":
            return _gated(log_ratio, tokens.advantage, objective)
        case "token_log":
            return _bounded_tokens(log_ratio, ratios.d, tokens, objective)
        case "binary_tv" | "binary_kl":
            return _masked(log_ratio, ratios, tokens, objective, truncated=True)
        case _:
            return _masked(log_ratio, ratios, tokens, objective, truncated=False)


def _clipped(log_ratio: Tensor, position: Tensor, advantages: Tensor, objective: PolicyObjective) -> Surrogate:
    """The max and min leave exactly one interval per sign of A:

        A >= 0:  l = -A min(r, upper bound)
        A <  0:  l = -A min(max(r, lower bound), dual bound)

    Each bound is compared with the quantity that it limits (log r or r), so rounding of exp cannot change a decision. A
    ratio equal to a bound counts as inside it.
    """
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


def _of_turns(ratios: TokenRatios, ends: TurnEnds, tokens: LossTokens, objective: PolicyObjective) -> Surrogate:
    """One term for each turn k that ends at the token or after it, at e(k), with the gain A_k - A_{k+1} of the turn:

        l_t = sum_{k: e(k) >= t} l(A_k - A_{k+1}, log r = S_{e(k)} + log p_t - sg[log p_t], position of e(k))

    with l the clipped loss. Only the term of the token's own turn is counted as clipped.
    """
    gain = ends.gain(tokens.advantage)
    log_ratio = capped(torch.where(tokens.model, ratios.log_ratio.detach(), 0.0), LOG_RATIO_CAP)
    of_end = _clipped(log_ratio, ratios.reach, ends.at_end(gain), objective)
    bounded = of_end.high | of_end.low | of_end.dual | (ratios.log_ratio > LOG_RATIO_CAP)
    value = ends.sum_from_here(of_end.loss)
    slope = ends.sum_from_here(torch.where(bounded, 0.0, of_end.loss))
    own = tokens.log_probs - tokens.log_probs.detach()
    counted = (side & tokens.trained for side in (of_end.high, of_end.low, of_end.dual))
    return Surrogate((value + slope * own).to(own.dtype), of_end.ratio, *counted)


def _detached(log_ratio: Tensor, tokens: LossTokens, objective: PolicyObjective) -> Surrogate:
    ratio, advantages = log_ratio.detach().exp(), tokens.advantage
    log_probs = torch.where(tokens.trained, tokens.log_probs, 0.0)
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    is_high, is_low = (advantages != 0) & (ratio > high), (advantages != 0) & (ratio < low)
    return Surrogate(-advantages * ratio.clamp(low, high) * log_probs, ratio, is_high, is_low, torch.zeros_like(is_low))


def _gated(log_ratio: Tensor, advantages: Tensor, objective: PolicyObjective) -> Surrogate:
    ratio, nothing = log_ratio.exp(), torch.zeros_like(log_ratio, dtype=torch.bool)
    tau = torch.full_like(ratio.detach(), objective.tau_negative).masked_fill(advantages > 0, objective.tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return Surrogate(-advantages * gate, ratio.detach(), nothing, nothing, nothing)


def _bounded_tokens(log_ratio: Tensor, d: Tensor, tokens: LossTokens, objective: PolicyObjective) -> Surrogate:
    """The sign of A is the majority's in a sequence: a ratio of several tokens has one."""
    votes = (tokens.advantage > 0).to(torch.int64) - (tokens.advantage < 0).to(torch.int64)
    sign = tokens.layout.to_tokens(tokens.layout.total(votes))
    above, below = (sign > 0) & (d > objective.clip_high), (sign < 0) & (d < -objective.clip_low)
    bounded = torch.where(above, objective.clip_high, torch.where(below, -objective.clip_low, d))
    x = token_ratios(objective.ratio_mode, bounded, torch.zeros_like(bounded), tokens.model, tokens.layout).log_ratio
    own = torch.where(above | below, 0.0, tokens.log_probs - tokens.log_probs.detach())
    r = capped(torch.where(tokens.trained, x + own, 0.0), LOG_RATIO_CAP).exp()
    high, low = above & tokens.trained, below & tokens.trained
    return Surrogate(-tokens.advantage * r, log_ratio.detach().exp(), high, low, torch.zeros_like(low))


def _masked(
    log_ratio: Tensor, ratios: TokenRatios, tokens: LossTokens, objective: PolicyObjective, *, truncated: bool
) -> Surrogate:
    advantages, limit = tokens.advantage, objective.clip_c if truncated else None
    left_out = _outside(ratios, tokens, objective)
    ratio = log_ratio.detach().exp()
    far = torch.zeros_like(left_out)
    if truncated:
        log_probs = torch.where(tokens.trained, tokens.log_probs, 0.0)
        factor = ratio
        if limit is not None:
            far = (advantages != 0) & (ratio > limit) & ~left_out
            factor = torch.where(ratio > limit, limit, ratio)
        loss = -advantages * factor * log_probs
    else:
        loss = -advantages * log_ratio.exp()
    high, low = left_out & (advantages > 0), left_out & (advantages < 0)
    return Surrogate(torch.where(left_out, 0.0, loss), ratio, high, low, far)


@torch.no_grad()
def _outside(ratios: TokenRatios, tokens: LossTokens, objective: PolicyObjective) -> Tensor:
    """bool `[N]`: tokens that the trust region of `clip_mode` takes out of the loss. A NaN takes nothing out.

    p_t and mu_t are the probabilities of the sampled token under the policy and under the anchor. All that is known of
    the two distributions is this token, so divergences are of the two-valued distributions "this token, or another".

    delta is `clip_high` for A > 0 and `clip_low` for A < 0; t and T count model tokens.

        binary_tv    |p - mu| > delta, and p moved to where A drives it             DPPO, arXiv 2602.04879
        binary_kl    mu log(mu/p) + (1 - mu) log((1 - mu)/(1 - p)) > delta, likewise
        prefix_tv    Z_t > min(delta, delta + budget W_{t-1} - Z_{1:t-1}), likewise (CPPO, arXiv 2606.10968, eq. 8-11).
                     Z_t = w_t |p - mu|, w_t = 1 - (1 - weight) (t - 1) / (T - 1); W and Z_{1:t} sum over the prefix.
                     budget is a number, or the largest of `min` and a quantile of the sequence's |p - mu|
        sequence_k3  the whole sequence where the mean over its tokens of k3 = r - 1 - log r exceeds `clip_high`, or the
                     largest `clip_c`                                               TRM, arXiv 2512.23075
    """
    if objective.clip_mode == "sequence_k3":
        return _distant_sequences(ratios.d, tokens.model, tokens.layout, objective)
    policy, anchor = (torch.where(tokens.model, x.double(), 0.0) for x in (tokens.log_probs, tokens.anchor))
    p, mu = policy.exp(), anchor.exp()
    delta = torch.full_like(p, objective.clip_low).masked_fill(tokens.advantage > 0, objective.clip_high)
    away = tokens.advantage * ratios.d > 0
    match objective.clip_mode:
        case "binary_tv":
            beyond = (p - mu).abs() > delta
        case "binary_kl":
            rest = ((1 - mu + SMALLEST_REST) / (1 - p + SMALLEST_REST)).log()
            beyond = (1 - mu) * rest - mu * ratios.d.double() > delta
        case "prefix_tv":
            distance = torch.where(tokens.model, (p - mu).abs(), 0.0)
            beyond = _over_budget(distance, ratios.position, delta, tokens, objective)
        case mode:
            raise ValueError(f"clip_mode {mode!r} has no trust region")
    return away & beyond


def _over_budget(
    distance: Tensor, position: Tensor, delta: Tensor, tokens: LossTokens, objective: PolicyObjective
) -> Tensor:
    length = tokens.layout.to_tokens(tokens.layout.total(tokens.model.to(torch.int64)))
    before = (position - 1).clamp(min=0).double()
    slope = (1 - objective.prefix_weight) / (length - 1).clamp(min=1)
    weighted = (1 - slope * before) * distance
    spent = prefix_sum(weighted, tokens.layout) - weighted
    weights = before - slope * before * (before - 1) / 2  # of the tokens before this one, summed
    budget: float | Tensor
    if isinstance(objective.prefix_budget, PrefixBudget):
        budget = _of_sequence(objective.prefix_budget, distance, tokens)
    else:
        budget = objective.prefix_budget
    return weighted > torch.minimum(delta, delta + budget * weights - spent)


def _of_sequence(budget: PrefixBudget, distance: Tensor, tokens: LossTokens) -> Tensor:
    """The larger of `min` and the quantile of a sequence's distances, `[N]`, from distances `[N]` of its model tokens.

    Between two ranks the quantile is interpolated linearly. Sorting does not depend on what else is in the batch.
    """
    if budget.quantile is None:
        return torch.full_like(distance, budget.min)
    layout, n = tokens.layout, distance.numel()
    if not n:
        return distance
    by_distance = torch.where(tokens.model, distance, torch.inf).argsort(stable=True)
    order = by_distance[layout.sequence_id[by_distance].argsort(stable=True)]
    place = budget.quantile * (layout.total(tokens.model.to(torch.int64)) - 1).clamp(min=0).double()
    first = layout.cu_seqlens[:-1]
    below, above = (distance[order[(first + rank.long()).clamp(max=n - 1)]] for rank in (place.floor(), place.ceil()))
    return layout.to_tokens((below + (place - place.floor()) * (above - below)).clamp(min=budget.min))


def _distant_sequences(d: Tensor, model: Tensor, layout: SequenceBounds, objective: PolicyObjective) -> Tensor:
    k3 = torch.where(model, torch.expm1(d.double()) - d.double(), 0.0)
    length = layout.to_tokens(layout.total(model.to(torch.int64))).clamp(min=1)
    distant = sequence_sum(k3.clamp(max=LARGEST_K3), layout) / length > objective.clip_high
    if objective.clip_c is None:
        return distant
    return distant | (layout.to_tokens(per_sequence(k3, layout, "max")) > objective.clip_c)


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
    _, _, ratios = objective_ratios(objective, log_probs, old_log_probs, model, layout, turn, torch.float32)
    low, high, _ = window(ratios.reach, torch.float32, objective)
    if objective.clip_mode in ("ratio", "detached_ratio"):
        low, high = low.clamp(min=0).log(), high.log()
    values = (ratios.log_ratio, low, high, prefix_sum(ratios.d, layout).float())
    return TokenDiagnostics(*(torch.where(model, value, 0.0).reshape(layout.shape) for value in values))
