"""Reports of passes and optimizer steps: statistics, time, and log-ratio of each token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ctpo_megatron.data import PackedBatch, Trajectory
from ctpo_megatron.objective import LossStats, PolicyObjective, merge, summarize, token_diagnostics
from ctpo_megatron.policy import device
from ctpo_megatron.policy.minibatch import Workload, anchor_of
from ctpo_megatron.policy.parallel import gather_on_rank_zero
from ctpo_megatron.policy.predictions import Anchor

Diagnostics = dict[int, dict[str, Any]]


class StepOutcome(Enum):
    """What became of an optimizer step.

    OVERFLOW: its gradient is too large for float16 at this loss scale. BAD: loss or gradient norm is not finite for
    another reason. Neither updates anything.
    """

    APPLIED = "applied"
    OVERFLOW = "overflow"
    BAD = "bad"


@dataclass(frozen=True)
class RankReport:
    """What a rank reports to the others after the passes of an optimizer step.

    distinct_tokens, computed_tokens, micro_batches: of its replica, which is number `dp_rank`.
    peak_mib: see `device.peak_memory_mib`.
    attention_shapes: different shapes of calls of attention since its start; 0 where they are not kept few.
    """

    dp_rank: int
    distinct_tokens: int
    computed_tokens: int
    micro_batches: int
    peak_mib: float
    attention_shapes: int = 0


@dataclass(frozen=True)
class Cost:
    """The cost of one optimizer step.

    seconds: wall time on this rank, packing included. overhead_s: the part outside of the forward and backward passes
    and the optimizer. ranks: the reports of all ranks, in their order.
    """

    work: Workload
    seconds: float
    overhead_s: float
    ranks: tuple[RankReport, ...]

    @property
    def replicas(self) -> list[RankReport]:
        """One report of each data-parallel replica."""
        return list({report.dp_rank: report for report in self.ranks}.values())


@dataclass(frozen=True)
class Update:
    """Report of one optimizer step: loss statistics over all ranks, gradient norm before clipping, learning rate, cost.

    loss_tokens: of all its trajectories, those that no pass runs over included. loss_scale: of its backward pass, in
    float16.
    """

    stats: LossStats
    grad_norm: float
    learning_rate: float
    cost: Cost
    loss_tokens: int
    outcome: StepOutcome = StepOutcome.APPLIED
    loss_scale: float | None = None

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return self.outcome is StepOutcome.APPLIED


class Clock:
    """Wall time since creation, and how much of it passes and optimizer took."""

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
        """Total seconds, and the seconds that were not busy."""
        seconds = time.perf_counter() - self._start
        return seconds, seconds - self._busy


def gather_diagnostics(micro_batches: Sequence[PackedBatch], objective: PolicyObjective, anchor: Anchor) -> Diagnostics:
    """See `Trainer.token_diagnostics`. micro_batches: of this rank, none where it does not report. Collective."""
    own: Diagnostics = {}
    for micro in micro_batches:
        own |= _diagnostics_of(micro, objective, anchor)
    diagnostics: Diagnostics = {}
    for part in gather_on_rank_zero(own) or []:
        diagnostics |= part
    return diagnostics


def _diagnostics_of(micro: PackedBatch, objective: PolicyObjective, anchor: Anchor) -> Diagnostics:
    reference = anchor_of(micro, anchor)
    if micro.log_probs is None:
        raise ValueError("token diagnostics need an update first")
    curves = token_diagnostics(
        micro.log_probs, reference, micro.response_mask, objective, cu_seqlens=micro.cu_seqlens, turn=micro.turn
    )
    # One copy to the host for all trajectories, because each copy waits for the device.
    columns = torch.stack([curves.log_ratio, curves.low, curves.high, curves.prefix]).cpu().numpy()
    diagnostics: Diagnostics = {}
    for index, tokens in micro.places():
        log_ratio, low, high, prefix = columns[:, tokens]
        diagnostics[index] = {
            "advantage": float(micro.on_host.advantages[tokens.start]),
            "log_ratio": log_ratio,
            "clip_low": low,
            "clip_high": high,
        } | ({} if objective.is_prefix_ratio else {"prefix_log_ratio": prefix})
        if (turn := micro.on_host.turn) is not None:
            turns, first = np.unique(turn[tokens].numpy(), return_index=True)
            values = micro.on_host.advantages[tokens].numpy()
            diagnostics[index]["turn_advantages"] = values[first[turns > 0]].tolist()
    return diagnostics


def of_trajectories(diagnostics: Diagnostics, trajectories: Sequence[Trajectory]) -> Diagnostics:
    """Diagnostics by trajectory, from those by sequence; numbers of tokens are in the order of the trajectory's tokens.

    One with a sequence that no pass has run over has none.
    """
    found: Diagnostics = {}
    place = 0
    for index, trajectory in enumerate(trajectories):
        turns = [np.unique(trajectory.tokens["turn"][tokens]) for tokens in trajectory.sequences]
        parts = [diagnostics[each] for each in range(place, place + len(turns)) if each in diagnostics]
        if len(parts) == len(turns):
            found[index] = parts[0] if len(parts) == 1 else _joined(parts, turns)
        place += len(turns)
    return found


def _joined(parts: Sequence[dict[str, Any]], turns: Sequence[NDArray[np.int16]]) -> dict[str, Any]:
    """turns: numbers of the turns of each part, with the 0 of its prompt."""
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name not in _OF_SEQUENCE}
    whole["advantage"] = parts[0]["advantage"]
    if "turn_advantages" in parts[0]:
        pairs = zip(turns, parts, strict=True)
        by_turn = {
            turn: value
            for numbers, part in pairs
            for turn, value in zip(numbers[numbers > 0].tolist(), part["turn_advantages"], strict=True)
        }
        whole["turn_advantages"] = [by_turn[turn] for turn in sorted(by_turn)]
    return whole


_OF_SEQUENCE = ("advantage", "turn_advantages")


def summarize_updates(updates: Sequence[Update], passes: int = 1) -> dict[str, float]:
    """Metrics of all optimizer steps of one batch: exact over tokens, mean loss, mean and largest gradient norm, cost.

    passes: how often each trajectory of the batch is in them.

    `pg_update/first_log_ratio_abs_max` is of the first step, where it shows whether the pass for old log-probs and the
    training pass agree. `pg_update/is_ratio/*` is of the last step, where the ratio has moved furthest. Skipped steps
    count only in cost, `actor/bad_steps` and `actor/overflow_steps`, unless all steps were skipped. A gradient that
    overflows has no norm.
    """
    applied = [update for update in updates if update.applied] or updates
    loss_tokens = sum(update.loss_tokens for update in applied)
    metrics = summarize(merge([update.stats for update in applied]), loss_tokens)
    each = [summarize(update.stats) for update in applied]
    with_ratios = [summary for summary in each if "pg_update/is_ratio/mean" in summary]
    first, last = each[0], with_ratios[-1] if with_ratios else {}
    metrics |= {name: value for name, value in last.items() if name.startswith("pg_update/is_ratio/")}
    if "pg_update/log_ratio_abs_max" in first:
        metrics["pg_update/first_log_ratio_abs_max"] = first["pg_update/log_ratio_abs_max"]
    for name in ("actor/pg_loss", "supervised/loss"):
        if name in metrics:
            metrics[name] /= len(applied)
    if norms := [update.grad_norm for update in applied if update.outcome is not StepOutcome.OVERFLOW]:
        metrics |= {"actor/grad_norm": sum(norms) / len(norms), "actor/grad_norm_max": max(norms)}
    outcomes = [update.outcome for update in updates]
    metrics["actor/bad_steps"] = float(outcomes.count(StepOutcome.BAD))
    if (scale := updates[-1].loss_scale) is not None:
        metrics |= {"actor/overflow_steps": float(outcomes.count(StepOutcome.OVERFLOW)), "actor/loss_scale": scale}
    return metrics | {"actor/lr": updates[-1].learning_rate} | cost_metrics([update.cost for update in updates], passes)


def cost_metrics(costs: Sequence[Cost], passes: int) -> dict[str, float]:
    """Metrics of all optimizer steps of one batch; see docs/reference/metrics.md. Sizes of the batch count once."""
    trained, flops = sum(c.work.trained_tokens for c in costs), sum(c.work.trained_flops for c in costs)
    replicas = [report for cost in costs for report in cost.replicas]
    peaks = [report.peak_mib for report in costs[-1].ranks]
    distinct = sum(report.distinct_tokens for report in replicas)
    shapes = max(report.attention_shapes for report in costs[-1].ranks)
    return {
        "tokens/total": float(sum(cost.work.tokens for cost in costs) / passes),
        "tokens/trained": float(trained),
        "tokens/forward_tflop": sum(cost.work.flops for cost in costs) / passes / 1e12,
        "tokens/trained_forward_tflop": flops / 1e12,
        "perf/distinct_rows": distinct / trained if trained else 1.0,
        "packing/useful_token_fraction": distinct / sum(report.computed_tokens for report in replicas),
        "packing/micro_batches": float(sum(report.micro_batches for report in replicas)),
        # Ranks wait for the slowest once per optimizer step, so the largest share counts, weighted by the step's work.
        "packing/imbalance": sum(c.work.imbalance * c.work.trained_flops for c in costs) / flops if flops else 1.0,
        "time/update_overhead_fraction": sum(c.overhead_s for c in costs) / sum(c.seconds for c in costs),
        "memory/trainer_peak_mib": max(peaks),
        **({"packing/attention_shapes": float(shapes)} if shapes else {}),
    } | {f"memory/rank_{rank}_peak_mib": peak for rank, peak in enumerate(peaks)}
