"""What the policy reports of its passes and optimizer steps: statistics, time, how far each token has moved."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import LossStats, PolicyObjective, merge, summarize, token_diagnostics
from ctpo_megatron.policy import device
from ctpo_megatron.policy.losses import Anchor
from ctpo_megatron.policy.start import old_log_probs_of
from ctpo_megatron.policy.workload import Cost, cost_metrics

Diagnostics = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Update:
    """What one optimizer step reports: loss statistics over all ranks, gradient norm before clipping, rate, cost.

    bad: loss or gradient norm was not finite, and nothing was updated. seen: metrics of `look`.
    """

    stats: LossStats
    grad_norm: float
    learning_rate: float
    cost: Cost
    bad: bool = False
    seen: Mapping[str, float] = field(default_factory=dict)


class Clock:
    """Wall time since it was made, and how much of it was busy with passes and optimizer."""

    def __init__(self, before_s: float) -> None:
        self._start = time.perf_counter() - before_s
        self._busy = 0.0

    @contextmanager
    def busy(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        device.synchronize()
        self._busy += time.perf_counter() - start

    def read(self) -> tuple[float, float]:
        """Seconds in all, and those that were not busy."""
        seconds = time.perf_counter() - self._start
        return seconds, seconds - self._busy


def diagnostics_of(micro: PackedBatch, objective: PolicyObjective, anchor: Anchor) -> Diagnostics:
    """`Trainer.token_diagnostics` of one micro-batch."""
    reference = micro.rollout_log_probs if anchor == "behaviour" else old_log_probs_of(micro)
    if micro.log_probs is None:
        raise ValueError("token diagnostics are those of an update, which comes first")
    curves = token_diagnostics(micro.log_probs, reference, micro.response_mask, objective, cu_seqlens=micro.cu_seqlens)
    names = ("log_ratio", "clip_low", "clip_high")
    columns = torch.stack([curves.log_ratio, curves.low, curves.high]).cpu().numpy()
    return {
        key: {"advantage": float(micro.on_host.advantages[place.start])}
        | {name: column[place] for name, column in zip(names, columns, strict=True)}
        for key, place in micro.places()
    }


def summarize_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Metrics of all optimizer steps of one batch: exact over tokens, mean loss, mean and largest gradient norm, cost.

    `pg_update/first_log_ratio_abs_max` belongs to the first step, where it shows whether the pass for old log-probs and
    the training pass agree; `pg_update/is_ratio/*` to the last, where the ratio has moved furthest. Steps that updated
    nothing are left out of all but cost and `actor/bad_steps`, unless there is no other.
    """
    applied = [update for update in updates if not update.bad] or updates
    metrics = summarize(merge([update.stats for update in applied]))
    each = [summarize(update.stats) for update in applied]
    first, last = each[0], next((found for found in reversed(each) if "pg_update/is_ratio/mean" in found), {})
    metrics |= {name: value for name, value in last.items() if name.startswith("pg_update/is_ratio/")}
    if "pg_update/log_ratio_abs_max" in first:
        metrics["pg_update/first_log_ratio_abs_max"] = first["pg_update/log_ratio_abs_max"]
    for name in ("actor/pg_loss", "supervised/loss"):
        if name in metrics:
            metrics[name] /= len(applied)
    norms = [update.grad_norm for update in applied]
    metrics |= {"actor/grad_norm": sum(norms) / len(norms), "actor/grad_norm_max": max(norms)}
    metrics["actor/bad_steps"] = float(sum(update.bad for update in updates))
    metrics |= updates[0].seen
    return metrics | {"actor/lr": updates[-1].learning_rate} | cost_metrics([update.cost for update in updates])
