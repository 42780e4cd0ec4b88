"""Corrects the mini-batches of a step for the sampler-trainer mismatch: weights, loss masks, denominators."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ctpo_megatron.config import CorrectionConfig, ObjectiveConfig, objective_from_config
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import (
    Corrected,
    Denominators,
    MismatchRows,
    correct,
    correction_metrics,
    noise_metrics,
    weight_mean,
)
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.passes import old_log_probs_of


def apply_correction(
    mini_batches: Sequence[MiniBatch], config: ObjectiveConfig, layout: Layout, equal_weights: bool
) -> dict[str, float]:
    """Set the weights of the mini-batches and mask rejected tokens; returns metrics, on rank zero only.

    Needs old log-probs (`Trainer.compute_old_log_probs`). Denominators count the remaining tokens: a rejected token is
    in no mean, and a sequence without remaining tokens counts like any masked sequence (`count_masked_sequences`).
    equal_weights: the batch was sampled with the trainer's current weights, so that `mismatch/*` is not a difference of
    policies. Collective.
    """
    correction = config.correction
    micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches] if layout.is_last_stage else []
    rows, left = _over_ranks(mini_batches, [_correct(micro, correction) for micro in micro_batches], layout)
    if correction.normalize and correction.level != "none":
        mean = weight_mean(rows, correction)
        for micro in micro_batches:
            assert micro.correction_weights is not None  # computed for this level
            micro.correction_weights = micro.correction_weights / mean
    if correction.rejects:
        for mini, counts in zip(mini_batches, left, strict=True):
            mini.denominators = Denominators.of_counts(counts)
    metrics = correction_metrics(rows, correction) if layout.is_rank_zero else {}
    if equal_weights and layout.is_rank_zero:
        metrics |= noise_metrics(rows, objective_from_config(config))
    return metrics


def _correct(micro: PackedBatch, config: CorrectionConfig) -> Corrected:
    corrected = correct(
        config,
        old_log_probs_of(micro),
        micro.rollout_log_probs,
        micro.response_mask,
        micro.loss_mask,
        micro.cu_seqlens,
    )
    micro.correction_weights, micro.loss_mask = corrected.weights, corrected.loss_mask
    return corrected


def _over_ranks(
    mini_batches: Sequence[MiniBatch], corrected: Sequence[Corrected], layout: Layout
) -> tuple[MismatchRows, list[list[int]]]:
    """The rows of all replicas, and the remaining loss tokens of every sequence of each mini-batch. One read-back."""
    mine = None
    if layout.reports:
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        # Alignment padding may form a further sequence at the end of a micro-batch, which is not listed.
        parts = [found.table[: len(m.sequences)] for m, found in zip(micro_batches, corrected, strict=True)]
        counts = [sum(len(micro.sequences) for micro in mini.micro_batches) for mini in mini_batches]
        mine = (corrected[0].names, torch.cat(parts).cpu(), counts)
    replicas = [part for part in gather_objects(mine) if part is not None]
    names = replicas[0][0]
    by_mini_batch = zip(*(table.split(counts) for _, table, counts in replicas), strict=True)
    tables = [torch.cat(shares) for shares in by_mini_batch]
    left = [table[:, names.index("left")].long().tolist() for table in tables]
    return MismatchRows(torch.cat(tables), names), left
