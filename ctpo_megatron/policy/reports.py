"""Reports of passes and optimizer steps: statistics, time, statistics by position, and log-ratio of each token."""

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
from ctpo_megatron.objective import (
    LossStats,
    PolicyObjective,
    PositionStats,
    SamplerTokens,
    merge,
    position_metrics,
    position_stats,
    skipped_stats,
    summarize,
    token_diagnostics,
)
from ctpo_megatron.policy import device
from ctpo_megatron.policy.minibatch import Anchor, MiniBatch, Workload, anchor_of
from ctpo_megatron.policy.parallel import Layout, gather_on_rank_zero

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

    work: of its replica, which is number `dp_rank`. peak_mib: see `device.peak_memory_mib`.
    """

    dp_rank: int
    work: Workload
    peak_mib: float


@dataclass(frozen=True)
class Update:
    """Report of one optimizer step: loss statistics over all ranks, gradient norm before clipping, learning rate, cost.

    work, loss_tokens: of all its trajectories, those that no pass runs over included. seconds: wall time on this rank,
    packing included. overhead_s: the part outside of the forward and backward passes and the optimizer. ranks: the
    reports of all ranks, in their order. loss_scale: of its backward pass, in float16.
    """

    stats: LossStats
    grad_norm: float
    learning_rate: float
    work: Workload
    seconds: float
    overhead_s: float
    ranks: tuple[RankReport, ...]
    loss_tokens: int
    outcome: StepOutcome = StepOutcome.APPLIED
    loss_scale: float | None = None

    @property
    def applied(self) -> bool:
        """Whether the weights were updated."""
        return self.outcome is StepOutcome.APPLIED

    @property
    def replicas(self) -> list[Workload]:
        """The work of each data-parallel replica."""
        return list({report.dp_rank: report.work for report in self.ranks}.values())


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
    return metrics | {"actor/lr": updates[-1].learning_rate} | _cost_metrics(updates, passes)


def _cost_metrics(updates: Sequence[Update], passes: int) -> dict[str, float]:
    """Metrics of all optimizer steps of one batch; see docs/reference/metrics.md. Sizes of the batch count once."""
    trained, flops = sum(u.work.trained_tokens for u in updates), sum(u.work.trained_flops for u in updates)
    replicas = [work for update in updates for work in update.replicas]
    peaks = [report.peak_mib for report in updates[-1].ranks]
    distinct = sum(work.distinct_tokens for work in replicas)
    return {
        "tokens/total": float(sum(u.work.tokens for u in updates) / passes),
        "tokens/trained": float(trained),
        "tokens/forward_tflop": sum(u.work.flops for u in updates) / passes / 1e12,
        "tokens/trained_forward_tflop": flops / 1e12,
        "perf/distinct_rows": distinct / trained if trained else 1.0,
        "packing/useful_token_fraction": distinct / sum(work.computed_tokens for work in replicas),
        "packing/micro_batches": float(sum(work.micro_batches for work in replicas)),
        # Ranks wait for the slowest once per optimizer step, so the largest share counts, weighted by the step's work.
        "packing/imbalance": sum(u.work.imbalance * u.work.trained_flops for u in updates) / flops if flops else 1.0,
        "time/update_overhead_fraction": sum(u.overhead_s for u in updates) / sum(u.seconds for u in updates),
        "memory/trainer_peak_mib": max(peaks),
    } | {f"memory/rank_{rank}_peak_mib": peak for rank, peak in enumerate(peaks)}


@dataclass(frozen=True)
class StepPositions:
    """Of the first and the last optimizer step, and of all of them together.

    updated: of the last, but of trajectories that its update skips the numbers of tokens alone, as in `whole`. On steps
    of `tracking.dump_every` a pass of their own runs over the skipped trajectories of `first` and `last`.
    """

    first: PositionStats
    last: PositionStats
    whole: PositionStats
    updated: PositionStats

    def __add__(self, other: StepPositions) -> StepPositions:
        return StepPositions(
            self.first + other.first, self.last + other.last, self.whole + other.whole, self.updated + other.updated
        )

    def metrics(self) -> dict[str, float]:
        """See `position_metrics`: of the same tokens in every step."""
        return position_metrics(self.updated, self.whole)


def gather_positions(
    mini_batches: Sequence[MiniBatch], objective: PolicyObjective | None, anchor: Anchor, layout: Layout
) -> StepPositions | None:
    """Of the latest pass over each mini-batch, usually its update's, on rank zero; None on the others. Collective.

    objective: None for a user's own. Without any mini-batch all are empty.
    """

    def stats_of(micro_batches: Sequence[PackedBatch]) -> PositionStats:
        each = [_of_pass(micro, objective, anchor) for micro in micro_batches if layout.reports]
        return sum(each, PositionStats.empty())

    updates = [stats_of(mini.micro_batches) for mini in mini_batches] or [PositionStats.empty()]
    counts = [_counted(mini) for mini in mini_batches] or [PositionStats.empty()]
    counted = [update + count for update, count in zip(updates, counts, strict=True)]
    first, last = (
        updates[place] + stats_of(mini_batches[place].skipped_micro_batches)
        if mini_batches and mini_batches[place].skipped_micro_batches
        else counted[place]
        for place in (0, -1)
    )
    own = StepPositions(first, last, sum(counted, PositionStats.empty()), counted[-1])
    parts: list[StepPositions | None] | None = gather_on_rank_zero(
        own if layout.reports or layout.is_rank_zero else None
    )
    if parts is None:
        return None
    one, *others = filter(None, parts)
    return sum(others, one)


def _counted(mini_batch: MiniBatch) -> PositionStats:
    """Numbers of tokens of the skipped trajectories, on rank zero, which alone has them all."""
    skipped = [tokens for sequence in mini_batch.skipped if (tokens := sequence.tokens) is not None]
    return skipped_stats((tokens["response_mask"], tokens["loss_mask"]) for tokens in skipped)


def _of_pass(micro: PackedBatch, objective: PolicyObjective | None, anchor: Anchor) -> PositionStats:
    if micro.log_probs is None:
        raise ValueError("statistics by position need an update first")
    return position_stats(
        micro.log_probs,
        anchor_of(micro, anchor),
        micro.advantages,
        micro.response_mask,
        micro.loss_mask,
        objective,
        micro.cu_seqlens,
        micro.entropy,
        micro.turn,
        SamplerTokens(micro.rollout_log_probs, micro.weight_version, micro.version, micro.old_log_probs),
    )
