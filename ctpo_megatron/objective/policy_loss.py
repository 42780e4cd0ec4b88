"""The loss of the policy and of SFT. Objectives of `ctpo_kernels` are computed by these, others in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import ctpo_kernels
from ctpo_kernels import CTPOStats, PerToken
from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.aggregation import Denominators, counts, token_scale
from ctpo_megatron.objective.ratios import LOG_RATIO_CAP, LossTokens, SequenceBounds, TokenRatios, objective_ratios
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
    if objective.on_kernels:
        loss, per_token, stats = _of_kernels(
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


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    response_mask: Tensor,
    objective: PolicyObjective,
    *,
    cu_seqlens: Tensor,
    loss_mask: Tensor | None = None,
    weights: Tensor | None = None,
    denominators: Denominators | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | None = None,
    rows: Tensor | None = None,
    may_learn: Tensor | None = None,
    accumulate_into_main_grad: bool = False,
    gradient_scale: float = 1.0,
    entropy: bool = False,
) -> PolicyLossOutput:
    """`policy_loss` of the log-probs of softmax(hidden weight^T / temperature), without the logits of all tokens.

    hidden: `[N, H]` (`[N / tp, H]` under `sequence_parallel`); row i predicts labels[i], and all other `[N]` tensors
    are aligned with the labels. weight: `[V / tp, H]`. old_log_probs: None takes the log-probs of this call. entropy:
    also return it. All others: as for `policy_loss` and `ctpo_kernels.fused_linear_ctpo`.
    """
    layout = SequenceBounds.of(labels, cu_seqlens)
    result = ctpo_kernels.fused_linear_ctpo(
        hidden,
        weight,
        labels,
        old_log_probs,
        response_mask,
        _row_or_column(advantages, layout),
        cu_seqlens,
        loss_mask=loss_mask,
        weights=None if weights is None else _row_or_column(weights, layout),
        temperature=temperature,
        vocab_size=vocab_size,
        tp_group=tp_group,
        cp_group=cp_group,
        sequence_parallel=sequence_parallel,
        chunk_size=chunk_size,
        rows=rows,
        may_learn=may_learn,
        accumulate_into_main_grad=accumulate_into_main_grad,
        gradient_scale=gradient_scale,
        return_entropy=entropy,
        entropy_coef=objective.entropy_coef,
        **_keywords(objective, denominators, response_mask, loss_mask, layout),
    )
    loss, stats, log_probs, entropies = cast(
        tuple[Tensor, CTPOStats, Tensor, Tensor | None], result if entropy else (*result, None)
    )
    return PolicyLossOutput(loss, None, LossStats(stats.sums, stats.maxima), log_probs, entropies)


def warm_up_kernels(
    objective: PolicyObjective | None,
    cu_seqlens: Tensor,
    *,
    streaming: bool,
    columns: int,
    vocab_size: int,
    dtype: torch.dtype,
    weighted: bool,
    tp_group: dist.ProcessGroup | None = None,
    cp_group: dist.ProcessGroup | None = None,
) -> None:
    """Compile the kernels of log-probs and of an objective over packed micro-batches, before the first of them.

    objective: None for log-probs alone, also of a supervised loss. cu_seqlens: `[B + 1]`, of any small batch: device,
    dtype and sequences (context parallelism: two pieces each) as in the run. streaming: `linear_policy_loss`, and
    `policy_loss` of logits otherwise. columns: of this rank's shard of the vocabulary. dtype: of weights, hidden states
    and logits. weighted: token losses have weights per token. Collective in both groups. See `ctpo_kernels.warm_up`.
    """
    shape = (int(cu_seqlens[-1]),)
    layout = SequenceBounds.of(cu_seqlens.new_zeros(shape), cu_seqlens)
    mask, values = cu_seqlens.new_ones(shape, dtype=torch.bool), cu_seqlens.new_ones(shape, dtype=torch.float32)
    boundaries = cu_seqlens if streaming else layout.cu_seqlens  # as the two functions above pass them
    with_loss = objective is not None and objective.on_kernels
    batches = [
        ctpo_kernels.LossTensors(
            old, mask, _row_or_column(values, layout), boundaries, mask, weights, shape[0], layout.sequences
        )
        for old in ((None, values) if streaming and with_loss else (values,))
        for weights in ((None, _row_or_column(values, layout)) if weighted and with_loss else (None,))
    ]
    log_probs = ctpo_kernels.linear_log_probs if streaming else ctpo_kernels.vocab_parallel_log_probs
    loss = ctpo_kernels.fused_linear_ctpo if streaming else ctpo_kernels.ctpo_loss
    ctpo_kernels.warm_up(
        columns,
        dtype,
        batches,
        functions=[log_probs, loss] if with_loss else [log_probs],
        loss=_of_objective(objective) if objective is not None else {},
        vocab_size=vocab_size,
        tp_group=tp_group,
        cp_group=cp_group,
        return_entropy=True,
        return_per_token=True,
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


def _of_kernels(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    objective: PolicyObjective,
    *,
    loss_mask: Tensor | None,
    weights: Tensor | None,
    layout: SequenceBounds,
    denominators: Denominators | None,
    cp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, LossStats]:
    """Loss, detached token losses and statistics of `policy_loss`, computed by `ctpo_kernels.ctpo_loss`.

    Tensors in the shape of `layout`; float32 or float64 log-probs.
    """

    def flat(values: Tensor) -> Tensor:
        return values.reshape(-1) if values.shape == layout.shape else values

    result = ctpo_kernels.ctpo_loss(
        log_probs.reshape(-1),
        flat(old_log_probs),
        flat(response_mask),
        _row_or_column(advantages, layout),
        layout.cu_seqlens,
        loss_mask=None if loss_mask is None else flat(loss_mask),
        weights=None if weights is None else _row_or_column(weights, layout),
        cp_group=cp_group,
        return_per_token=True,
        **_keywords(objective, denominators, response_mask, loss_mask, layout),
    )
    loss, stats, per_token = cast(tuple[Tensor, CTPOStats, PerToken], result)  # because return_per_token is set
    return loss, per_token.loss.reshape(layout.shape), LossStats(stats.sums, stats.maxima)


def _row_or_column(values: Tensor, layout: SequenceBounds) -> Tensor:
    """Values per token as `[1, N]`, per sequence as `[B, 1]`: the kernels refuse to guess where N == B."""
    if values.shape == layout.shape:
        return values.reshape(1, -1)
    return values[:, None] if values.shape == (layout.sequences,) else values


def _keywords(
    objective: PolicyObjective,
    denominators: Denominators | None,
    response_mask: Tensor,
    loss_mask: Tensor | None,
    layout: SequenceBounds,
) -> dict[str, Any]:
    """The objective and the counts of its means as keywords of the kernels."""
    # By default the kernels count every sequence, also those without a loss token. Which ones count is decided here, so
    # the counts are always passed.
    of_step: Sequence[int | Tensor]
    if denominators is None:
        _, trained = layout.masks(response_mask, loss_mask)
        of_step = counts(trained, layout).unbind()  # 0-d tensors: no read-back
    else:
        of_step = denominators.as_list()
    sequences, trained_sequences, tokens = of_step
    size = sequences if objective.count_masked_sequences else trained_sequences
    return _of_objective(objective) | {"batch_num_tokens": tokens, "global_batch_size": size}


def _of_objective(objective: PolicyObjective) -> dict[str, Any]:
    return {
        "clip_low": objective.clip_low,
        "clip_high": objective.clip_high,
        "clip_c": objective.clip_c,
        "clip_power": objective.clip_power,
        "clip_mode": objective.clip_mode,
        "ratio_mode": objective.ratio_mode,
        "loss_agg_mode": objective.loss_agg_mode,
        "loss_scale_factor": objective.loss_scale_factor,
    }


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
