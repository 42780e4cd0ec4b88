"""Old log-probs: under the weights before the first update, from a separate pass or from the first update's pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ctpo_megatron.config import ObjectiveConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.policy.correction import apply_correction
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.parallel import Layout, gather_objects
from ctpo_megatron.policy.passes import Passes, old_log_probs_of

Plan = Literal["none", "first update", "pass"]


class OldLogProbs:
    """Old log-probs of one batch, and the metrics computed from them; every method is collective.

    equal_weights: see `apply_correction`.
    """

    def __init__(self, objective: ObjectiveConfig, passes: Passes, layout: Layout, *, equal_weights: bool) -> None:
        self._objective = objective
        self._passes = passes
        self._layout = layout
        self._equal_weights = equal_weights
        self._plan = self.plan(objective)

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

    def before_updates(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Run the pass that the plan needs; returns metrics of the amount computed.

        If all old log-probs are then known, also applies a correction and returns the metrics of `start_metrics`.
        """
        needs_pass = {"pass": mini_batches, "first update": mini_batches[1:], "none": ()}[self._plan]
        if needs_pass:
            self._passes.fill_old_log_probs(needs_pass)
        metrics = {
            "tokens/old_log_probs": float(sum(mini.work.trained_tokens for mini in needs_pass)),
            "tokens/old_log_probs_tflop": sum(mini.work.trained_flops for mini in needs_pass) / 1e12,
        }
        if self._plan == "pass":
            return metrics | self._metrics(mini_batches)
        for micro in mini_batches[0].micro_batches:
            micro.on_policy = True
        return metrics

    def after_first_gradient(self, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """The metrics that `before_updates` could not compute yet. No optimizer step has been made."""
        if self._plan == "pass":
            return {}
        return self._metrics(mini_batches if self._plan == "first update" else mini_batches[:1])

    def _metrics(self, known: Sequence[MiniBatch]) -> dict[str, float]:
        metrics = start_metrics(known, self._layout)
        return metrics | apply_correction(known, self._objective, self._layout, self._equal_weights)


def start_metrics(mini_batches: Sequence[MiniBatch], layout: Layout) -> dict[str, float]:
    """`mismatch/*` (|sampler - trainer| in nats) and `actor/entropy` (nats over model tokens) of the old log-probs.

    Compares the `mismatch/tokens` that the current weights have sampled. The same on every rank; collective. Metrics
    without any token are omitted.
    """
    micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
    own = _totals(micro_batches) if layout.reports else None
    replicas = [totals for totals in gather_objects(own) if totals is not None]
    tokens, compared = (sum(totals[name] for totals in replicas) for name in ("tokens", "compared"))
    metrics = {"mismatch/tokens": compared}
    if tokens:
        metrics["actor/entropy"] = sum(totals["entropy"] for totals in replicas) / tokens
    if compared:
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
        compared = micro.on_host.current.nonzero().squeeze(1).to(micro.token_ids.device, non_blocking=True)
        parts.append((old_log_probs_of(micro) - micro.rollout_log_probs)[compared].abs())
    difference = torch.cat(parts)
    largest = difference.max() if difference.numel() else difference.sum()  # the sum of no tokens is 0
    entropies = [micro.entropy_sum for micro in micro_batches if micro.entropy_sum is not None]
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
