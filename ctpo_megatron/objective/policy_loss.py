"""The loss of the policy, in plain torch or (on CUDA, over split sequences) by `ctpo_kernels`; the supervised loss."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.aggregation import Denominators, token_scale
from ctpo_megatron.objective.fused import fused_policy_loss
from ctpo_megatron.objective.ratios import LOG_RATIO_CAP, LossTokens, TokenRatios, objective_ratios
from ctpo_megatron.objective.sequences import SequenceBounds
from ctpo_megatron.objective.stats import LossStats, PolicyLossOutput, stats_of
from ctpo_megatron.objective.surrogate import Surrogate, surrogate


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    objective: PolicyObjective,
    *,
    loss_mask: Tensor | None = None,
    weights: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    denominators: Denominators | None = None,
    cp_group: dist.ProcessGroup | None = None,
    entropy: Tensor | None = None,
    turn: Tensor | None = None,
) -> PolicyLossOutput:
    """Loss of a padded `[B, T]` or packed `[N]` batch (tokens of one sequence adjacent and in order).

    log_probs: log-probabilities (nats) of the sampled tokens under the policy in training; the only differentiable
        input. float32 or float64; lower precisions are converted to float32.
    old_log_probs: the denominator of the ratio. Log-probs recomputed by the trainer with the weights before the first
        update of the batch ("proximal"), or as the sampler reported them ("behaviour").
    advantages: A_t per token, or one per sequence `[B]`.
    response_mask: 1 where the policy sampled the token. Only these enter the prefix sum and advance the position t.
    loss_mask: 1 where the token contributes to the loss (default and at most response_mask). It affects the loss alone:
        dropping a token does not change the ratio and bounds of other tokens.
    weights: detached correction factors w_t, per token or `[B]` (default 1).
    cu_seqlens: int `[B + 1]`, boundaries of a packed batch.
    denominators: counts of the whole optimizer step; None: this batch is the whole step.
    cp_group: context-parallel ranks that each hold two pieces of every sequence, as `ctpo_kernels.ctpo_loss` takes them
        (packed only, `denominators` required). Loss and statistics are this rank's share. Collective. For objectives
        that are `on_kernels`, without an `entropy_coef`; the others need whole sequences.
    entropy: of the policy at each token, nats, differentiable, in the shape of log_probs; required with an
        `entropy_coef`. Times this it is subtracted from the loss, aggregated as the loss is, without `weights`.
        `per_token` and statistics are of the policy loss alone.
    turn: the turn of each token, integers in the shape of log_probs; required with `turn_ratio: turn-end`. The tokens
        of a turn have one advantage, by its return to go.

    The gradient of token t's loss reaches its own log-prob only: -A_t r_t w_t inside the bounds, 0 beyond them. Values
    at masked positions, NaN included, have no effect. A NaN at a response token propagates to the rest of its own
    sequence (cumulative ratios), to that token alone (token ratio), or to the whole sequence (sequence ratios). No host
    synchronisation on CUDA tensors. Raises ValueError for shapes that do not fit.
    """
    layout = SequenceBounds.of(log_probs, cu_seqlens)
    dtype = log_probs.dtype if log_probs.dtype == torch.float64 else torch.float32
    split = cp_group is not None and cp_group.size() > 1
    if split and denominators is None:
        raise ValueError("denominators: a context-parallel rank sees a share of the sequences; give the step's counts")
    if split and (objective.entropy_coef or not objective.on_kernels):
        raise ValueError(
            f"clip_mode: {objective.clip_mode} with entropy_coef: {objective.entropy_coef} needs whole sequences, and "
            "a context-parallel rank holds pieces: gather the log-probs first"
        )
    if objective.entropy_coef and entropy is None:
        raise ValueError(f"entropy: entropy_coef is {objective.entropy_coef}; give the entropy of every token")
    bonus = _entropy_bonus(entropy, response_mask, loss_mask, layout, objective, denominators)
    if objective.on_kernels and (log_probs.is_cuda or split):
        loss, per_token, stats = fused_policy_loss(
            log_probs.to(dtype),
            old_log_probs,
            advantages,
            response_mask,
            objective,
            loss_mask=loss_mask,
            weights=weights,
            layout=layout,
            denominators=denominators,
            cp_group=cp_group,
        )
        return PolicyLossOutput(loss if bonus is None else loss - bonus.to(dtype), per_token, stats)
    model, trained = layout.masks(response_mask, loss_mask)
    current, anchor, ratios = objective_ratios(objective, log_probs, old_log_probs, model, layout, turn, dtype)
    counted = trained if ratios.ends is None else model
    advantage = torch.where(counted, layout.values(advantages.detach(), "advantages", dtype, per_sequence=True), 0.0)
    token = surrogate(ratios, LossTokens(current, anchor, advantage, model, trained, layout), objective)
    per_token = token.loss
    if weights is not None:
        per_token = per_token * layout.values(weights.detach(), "weights", dtype, per_sequence=True)
    per_token = torch.where(trained, per_token, 0.0)

    scale = token_scale(trained, layout, objective, denominators)
    loss = (per_token * scale).sum()  # float64: the float32 result does not depend on the order of the tokens
    stats = _stats(loss, ratios, token, model, trained)
    loss = loss if bonus is None else loss - bonus
    return PolicyLossOutput(loss.to(dtype), per_token.reshape(layout.shape), stats)


def _entropy_bonus(
    entropy: Tensor | None,
    response_mask: Tensor,
    loss_mask: Tensor | None,
    layout: SequenceBounds,
    objective: PolicyObjective,
    denominators: Denominators | None,
) -> Tensor | None:
    """What `entropy_coef` subtracts from the loss: float64 scalar; None without it."""
    if entropy is None or not objective.entropy_coef:
        return None
    _, trained = layout.masks(response_mask, loss_mask)
    values = torch.where(trained, layout.values(entropy, "entropy", entropy.dtype), 0.0)
    return objective.entropy_coef * (values * token_scale(trained, layout, objective, denominators)).sum()


@torch.no_grad()
def _stats(loss: Tensor, ratios: TokenRatios, token: Surrogate, model: Tensor, trained: Tensor) -> LossStats:
    """Sums and extrema of one batch; all `[N]` inputs flat."""
    log_ratio = ratios.log_ratio.detach()
    excess = torch.where(trained, token.ratio.double() - 1, 0.0)
    return stats_of(
        {
            "loss": loss,
            "loss_tokens": trained.sum(),
            "model_tokens": model.sum(),
            "minus_d": -ratios.d.double().sum(),
            "ratio_excess": excess.sum(),
            "ratio_excess_squared": excess.square().sum(),
            "clip_high": token.high.sum(),
            "clip_low": token.low.sum(),
            "clip_dual": token.dual.sum(),
            "capped": (trained & (log_ratio > LOG_RATIO_CAP)).sum(),
        },
        {
            "ratio": (token.ratio, trained),
            "minus_ratio": (-token.ratio, trained),
            "abs_log_ratio": (log_ratio.abs(), model),
        },
    )


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
