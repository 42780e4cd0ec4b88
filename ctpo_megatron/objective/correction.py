"""Correction of the sampler-trainer mismatch at the start of a batch: importance weights and rejected tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ctpo_megatron.config import CorrectionConfig, RejectConfig
from ctpo_megatron.objective.mismatch import Columns, option_name, per_sequence
from ctpo_megatron.objective.ratios import prefix_sum, sequence_sum, token_log_ratio
from ctpo_megatron.objective.sequences import SequenceBounds

CorrectionKind = Literal["token", "sequence", "prefix"]


@dataclass(frozen=True)
class Corrected:
    """A packed micro-batch after its correction. Everything is detached.

    weights: `[N]`, w_t before normalization, 1 where response_mask is 0; None without weights. loss_mask: bool `[N]`,
    after rejection. table: float64 `[B, columns]` of `names`, one row per sequence (`mismatch.per_sequence`).
    """

    weights: Tensor | None
    loss_mask: Tensor
    table: Tensor
    names: tuple[str, ...]


@torch.no_grad()
def correct(
    config: CorrectionConfig,
    proximal_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
) -> Corrected:
    """Weights, rejection and statistics of packed sequences; all tensors `[N]`, cu_seqlens `[B + 1]`.

    With d_t = proximal_t - rollout_t over model tokens, |d_t| <= 20, the weights by `config.level` are:

        token      min(cap, exp d_t)
        sequence   min(cap, exp sum_t d_t)      one weight for the whole sequence
        prefix     min(cap, exp sum_{k<=t} d_k) tokens up to t only: the causal form that fits CTPO

    Rejection and veto change the loss mask alone, not the positions and prefix sums of other tokens. A NaN rejects
    nothing, so that it shows in the loss. Nothing is read back from the device.
    """
    layout = SequenceBounds.of(proximal_log_probs, cu_seqlens)
    model, trained = layout.mask(response_mask, "response_mask"), layout.mask(loss_mask, "loss_mask")
    d = _difference(proximal_log_probs, rollout_log_probs, model, layout)
    columns = Columns(layout, model)
    columns.add_log_probs(proximal_log_probs, rollout_log_probs, d)
    weights = None
    if config.level != "none":
        log_weight = _log_weight(config.level, d, layout)
        # Clamped in log space: exp of a long sum would overflow.
        truncated = log_weight.clamp(max=math.log(config.cap)).exp()
        weights = torch.where(model, truncated.to(d.dtype), 1.0)
        columns.add_weights(log_weight, weights, config.cap)
    rejected = torch.zeros_like(model)
    for reject in config.reject:
        values = _statistic(reject, d.double(), model, layout)
        low = torch.zeros_like(model) if reject.low is None else model & (values < reject.low)
        high = torch.zeros_like(model) if reject.high is None else model & (values > reject.high)
        columns.add_statistic(option_name(reject), values, low, high)
        rejected = rejected | low | high
    if config.veto is not None:
        vetoed = model & layout.to_tokens(per_sequence(d.double(), layout, "min") < math.log(config.veto))
        columns.add("vetoed", vetoed)
        rejected = rejected | vetoed
    left = trained & ~rejected
    columns.add("rejected", rejected)
    columns.add("left", left)
    return Corrected(weights, left, columns.table(), columns.names)


def _difference(proximal: Tensor, rollout: Tensor, model: Tensor, layout: SequenceBounds) -> Tensor:
    """d_t `[N]`, float64 for float64 inputs, else float32."""
    dtype = proximal.dtype if proximal.dtype == torch.float64 else torch.float32
    found = (layout.values(proximal, "proximal_log_probs", dtype), layout.values(rollout, "rollout_log_probs", dtype))
    return token_log_ratio(*found, model)


def _log_weight(kind: CorrectionKind, d: Tensor, layout: SequenceBounds) -> Tensor:
    match kind:
        case "token":
            return d
        case "sequence":
            return sequence_sum(d, layout)
        case "prefix":
            return prefix_sum(d, layout)


def _statistic(reject: RejectConfig, d: Tensor, model: Tensor, layout: SequenceBounds) -> Tensor:
    """`[N]`, float64: the statistic of each token or of its sequence."""
    values = {"k1": lambda: -d, "k2": lambda: 0.5 * d.square(), "k3": lambda: d.exp() - 1 - d}[reject.stat]()
    match reject.over:
        case "token":
            return values
        case "sequence_max":
            return layout.to_tokens(per_sequence(torch.where(model, values, -math.inf), layout, "max"))
        case "sequence_sum":
            return layout.to_tokens(per_sequence(values, layout, "sum"))
        case "sequence_mean":
            tokens = per_sequence(model.double(), layout, "sum").clamp(min=1)
            return layout.to_tokens(per_sequence(values, layout, "sum") / tokens)
