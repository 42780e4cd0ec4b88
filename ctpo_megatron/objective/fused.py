"""The objectives computed by `ctpo_kernels`: from log-probs in one pass, or from hidden states without all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import ctpo_kernels
from ctpo_kernels import CTPOStats, PerToken
from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.aggregation import Denominators, counts
from ctpo_megatron.objective.sequences import SequenceBounds
from ctpo_megatron.objective.stats import LossStats, PolicyLossOutput


def fused_policy_loss(
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
    cp_group: dist.ProcessGroup | None = None,
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
