"""Old log-probs of a batch, its sampler-trainer mismatch, and the correction for it, before the first optimizer step.

Old log-probs are under the weights before the first update, from a separate pass or from the first update's pass."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from ctpo_megatron.base.host_copies import to_device
from ctpo_megatron.config import CorrectionConfig, ObjectiveConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import (
    Corrected,
    Denominators,
    MismatchRows,
    PolicyObjective,
    correct,
    correction_metrics,
    noise_metrics,
    weight_mean,
)
from ctpo_megatron.policy.minibatch import MiniBatch, all_micro_batches, old_log_probs_of
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.passes import Passes

log = logging.getLogger(__name__)


class MismatchError(RuntimeError):
    """Sampler and trainer disagree by more than `rollout.mismatch_limit`; the message says what may help."""


def check_mismatch(
    metrics: Mapping[str, float], limit: float | None, max_response_tokens: int, dtypes: tuple[str, str]
) -> None:
    """Raises MismatchError when sampler and trainer log-probs differ by more than `limit` (nats; None: no limit).

    A batch without tokens of the current weights has nothing to compare. Warns once when their noise alone crosses the
    clip window within `max_response_tokens` (`mismatch/t_star`). dtypes: of trainer and sampler, for the messages.
    """
    difference = metrics.get("mismatch/log_prob_abs_max", 0.0)
    if limit is not None and not difference <= limit:  # a NaN exceeds every limit
        raise MismatchError(
            f"sampler and trainer log-probs differ by up to {difference:.3g}, more than rollout.mismatch_limit="
            f"{limit}. {_precision(dtypes)}"
        )
    if metrics.get("mismatch/t_star", math.inf) < max_response_tokens:
        _warn_of_noise(max_response_tokens, dtypes)


def _precision(dtypes: tuple[str, str]) -> str:
    """What the precision of trainer and sampler says of the cause."""
    trainer, sampler = dtypes
    if trainer != sampler:
        sides = f"the trainer computes in {trainer} (policy.dtype), the sampler in {sampler} (rollout.engine.dtype)"
        return f"Likely: {sides}; set rollout.engine.dtype: auto"
    rounding = "" if trainer == "float32" else f" the rounding of {trainer} (policy.dtype: float32 has less), or"
    return f"Both sides compute in {trainer} (policy.dtype, rollout.engine.dtype). Likely:{rounding} a lost weight sync"


@functools.cache
def _warn_of_noise(longest: int, dtypes: tuple[str, str]) -> None:
    log.warning(
        "sampler and trainer differ by so much noise at equal weights (mismatch/sigma) that a ratio against the "
        "sampler leaves the clip window by it alone (at token mismatch/t_star) before rollout.max_response_tokens=%d. "
        "%s. See also objective.correction (docs/objective.md)",
        longest,
        _precision(dtypes),
    )


SampledBy = Literal["these", "earlier", "others"]
"""The weights that sampled a batch: the trainer's current ones alone, earlier ones too, or another policy's."""


def apply_correction(
    mini_batches: Sequence[MiniBatch],
    correction: CorrectionConfig,
    layout: Layout,
    objective: PolicyObjective | None = None,
) -> dict[str, float]:
    """Set the weights of the mini-batches and mask rejected tokens; returns metrics, on rank zero only.

    Needs old log-probs (`Trainer.compute_old_log_probs`). Denominators count the remaining tokens: a rejected token is
    in no mean, and a sequence without remaining tokens counts like any masked sequence (`count_masked_sequences`).
    objective: given where the batch was sampled with the trainer's current weights, so that `mismatch/*` of its ratios
    is no difference of policies. Collective.
    """
    micro_batches = all_micro_batches(mini_batches) if layout.is_last_stage else []
    rows, left = _over_ranks(mini_batches, [_correct(micro, correction) for micro in micro_batches], layout)
    if correction.normalize and correction.level != "none":
        mean = weight_mean(rows, correction)
        for micro in micro_batches:
            assert micro.correction_weights is not None  # computed for this level
            micro.correction_weights = micro.correction_weights / mean
    if "rejected" in rows:
        for mini, counts in zip(mini_batches, left, strict=True):
            mini.denominators = Denominators.of_counts(counts)
    metrics = correction_metrics(rows, correction) if layout.is_rank_zero else {}
    if objective is not None and layout.is_rank_zero:
        metrics |= noise_metrics(rows, objective)
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
        micro_batches = all_micro_batches(mini_batches)
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


Plan = Literal["none", "first update", "pass"]


class OldLogProbs:
    """Old log-probs of batches, and the metrics computed from them; every method is collective.

    Without `mismatch/*` of log-probs where others have sampled the batch: a difference of policies is no fault.
    """

    def __init__(self, config: ObjectiveConfig, objective: PolicyObjective, passes: Passes, layout: Layout) -> None:
        self._correction, self._objective = config.correction, objective
        self._passes, self._layout = passes, layout
        self._plan = self.plan(config)

    @staticmethod
    def plan(objective: ObjectiveConfig) -> Plan:
        """Which old log-probs a batch needs before its first update.

        pass: of all mini-batches, because a correction needs them before the first loss. first update: of all but the
        first mini-batch. The first is trained on with the initial weights of the batch, so its own training pass
        computes them.
        none: ratios are against the sampler. The first update computes them for its mini-batch, for metrics alone.
        """
        correction = objective.correction
        if correction.level != "none" or correction.rejects:
            return "pass"
        return "none" if objective.anchor == "behaviour" else "first update"

    def before_updates(self, mini_batches: Sequence[MiniBatch], sampled_by: SampledBy) -> dict[str, float]:
        """Run the pass that the plan needs; returns metrics of the amount computed.

        If all old log-probs are then known, also applies a correction and returns the metrics of `start_metrics`.
        """
        needs_pass = {"pass": mini_batches, "first update": mini_batches[1:], "none": ()}[self._plan]
        if needs_pass:
            self._passes.score(all_micro_batches(needs_pass), old=True)
        metrics = {
            "tokens/old_log_probs": float(sum(mini.work.trained_tokens for mini in needs_pass)),
            "tokens/old_log_probs_tflop": sum(mini.work.trained_flops for mini in needs_pass) / 1e12,
        }
        if self._plan == "pass":
            return metrics | self._metrics(mini_batches, sampled_by)
        for micro in mini_batches[0].micro_batches:
            micro.on_policy = True
        return metrics

    def after_first_gradient(self, mini_batches: Sequence[MiniBatch], sampled_by: SampledBy) -> dict[str, float]:
        """Return the metrics that `before_updates` could not compute yet. No optimizer step has been made."""
        if self._plan == "pass":
            return {}
        return self._metrics(mini_batches if self._plan == "first update" else mini_batches[:1], sampled_by)

    def _metrics(self, known: Sequence[MiniBatch], sampled_by: SampledBy) -> dict[str, float]:
        metrics = start_metrics(known, self._layout, compare=sampled_by != "others")
        metrics |= self._passes.router_metrics()
        objective = self._objective if sampled_by == "these" else None
        return metrics | apply_correction(known, self._correction, self._layout, objective)


def start_metrics(mini_batches: Sequence[MiniBatch], layout: Layout, *, compare: bool = True) -> dict[str, float]:
    """`mismatch/*` (|sampler - trainer| in nats) and `actor/entropy` (nats over model tokens) of the old log-probs.

    Compares the `mismatch/tokens` that the current weights have sampled, unless not to `compare`. The same on every
    rank; collective. Metrics without any token are omitted.
    """
    micro_batches = all_micro_batches(mini_batches)
    own = _totals(micro_batches) if layout.reports else None
    replicas = [totals for totals in gather_objects(own) if totals is not None]
    tokens, compared = (sum(totals[name] for totals in replicas) for name in ("tokens", "compared"))
    metrics = {"mismatch/tokens": compared} if compare else {}
    if tokens:
        metrics["actor/entropy"] = sum(totals["entropy"] for totals in replicas) / tokens
    if compared and compare:
        metrics["mismatch/log_prob_abs_max"] = max(totals["max"] for totals in replicas)
        metrics["mismatch/log_prob_abs_mean"] = sum(totals["sum"] for totals in replicas) / compared
    return metrics


def _totals(micro_batches: Sequence[PackedBatch]) -> dict[str, float]:
    """Sums over the tokens of these micro-batches; one read-back.

    sum, max: of |sampler - trainer| (nats) over the `compared` tokens, sampled by the current weights.
    """
    parts = []
    for micro in micro_batches:
        # Indices are computed on the host: with a boolean mask on the device the host would wait for their number.
        compared = to_device(micro.on_host.current.nonzero().squeeze(1), micro.token_ids.device)
        parts.append((old_log_probs_of(micro) - micro.rollout_log_probs)[compared].abs())
    difference = torch.cat(parts)
    largest = difference.max() if difference.numel() else difference.sum()  # the sum of no tokens is 0
    entropies = [micro.entropy.sum(dtype=torch.float64) for micro in micro_batches if micro.entropy is not None]
    sums = [largest.double(), difference.sum().double(), *entropies]
    most, total, *entropy = torch.stack(sums).tolist()
    tokens = sum(int(micro.on_host.response_mask.sum()) for micro in micro_batches)
    return {
        "max": most,
        "sum": total,
        "compared": float(difference.numel()),
        "tokens": float(tokens),
        "entropy": sum(entropy),
    }
