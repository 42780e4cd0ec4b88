"""Trust regions: which tokens leave the loss, by a divergence between policy and anchor instead of a bound on r.

p_t and mu_t are the probabilities of the sampled token under the policy and under the anchor. All that is known of the
two distributions is this token, so divergences are of the two-valued distributions "this token, or another".
"""

from __future__ import annotations

import torch
from torch import Tensor

from ctpo_megatron.config import PolicyObjective, PrefixBudget
from ctpo_megatron.objective.mismatch import per_sequence
from ctpo_megatron.objective.ratios import LossTokens, TokenRatios, prefix_sum, sequence_sum
from ctpo_megatron.objective.sequences import SequenceBounds

SMALLEST_REST = 1e-8
"""Added to 1 - p and 1 - mu in the KL divergence, as the authors of DPPO do (verl, `compute_policy_loss_dppo_kl`)."""

LARGEST_K3 = 1_000.0
"""Larger estimates count as this in the mean over a sequence: the fixed point of a sum would overflow."""


@torch.no_grad()
def outside(ratios: TokenRatios, tokens: LossTokens, objective: PolicyObjective) -> Tensor:
    """bool `[N]`: tokens that the trust region of `clip_mode` takes out of the loss. A NaN takes nothing out.

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
