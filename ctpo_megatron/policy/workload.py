"""Work and cost of an optimizer step: tokens, model FLOPs, padding, balance, overhead, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SHORTEST_OF_CLASS = 0.95
"""A sequence joins a class of padded attention rows if it has at least this share of the longest one's length."""


@dataclass(frozen=True)
class Workload:
    """The work of one optimizer step.

    tokens: of its trajectories, over all ranks. flops: model FLOPs of one forward pass over them. trained_tokens,
    trained_flops: the same for the trajectories that the passes run over. imbalance: largest over mean model FLOPs of
    the data-parallel ranks' shares. computed_tokens: rows of attention in this rank's replica, alignment and padding
    included. packing_s: seconds that this rank spent on packing.
    """

    tokens: int
    flops: float
    trained_tokens: int
    trained_flops: float
    imbalance: float
    computed_tokens: int
    packing_s: float


@dataclass(frozen=True)
class RankReport:
    """What a rank reports to the others after the passes of an optimizer step.

    computed_tokens, micro_batches: of its replica, which is number `dp_rank`. peak_mib: see `device.peak_memory_mib`.
    """

    dp_rank: int
    computed_tokens: int
    micro_batches: int
    peak_mib: float


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


def length_classes(lengths: Sequence[int]) -> list[int]:
    """Class of each sequence for padded attention: from the longest, lengths within `SHORTEST_OF_CLASS` of it."""
    classes = [0] * len(lengths)
    longest, number = None, -1
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if longest is None or lengths[index] < SHORTEST_OF_CLASS * longest:
            longest, number = lengths[index], number + 1
        classes[index] = number
    return classes


def padded_tokens(cu_seqlens: torch.Tensor) -> int:
    """Rows of the local layer spec's attention over these sequences, each padded to the longest of its class."""
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    longest: dict[int, int] = {}
    classes = length_classes(lengths)
    for number, length in zip(classes, lengths, strict=True):
        longest[number] = max(longest.get(number, 0), length)
    return sum(longest[number] for number in classes)


def cost_metrics(costs: Sequence[Cost]) -> dict[str, float]:
    """Metrics of all optimizer steps of one batch; see docs/metrics.md."""
    trained, flops = sum(c.work.trained_tokens for c in costs), sum(c.work.trained_flops for c in costs)
    replicas = [report for cost in costs for report in cost.replicas]
    peaks = [report.peak_mib for report in costs[-1].ranks]
    return {
        "tokens/total": float(sum(cost.work.tokens for cost in costs)),
        "tokens/trained": float(trained),
        "tokens/forward_tflop": sum(cost.work.flops for cost in costs) / 1e12,
        "tokens/trained_forward_tflop": flops / 1e12,
        "packing/useful_token_fraction": trained / sum(report.computed_tokens for report in replicas),
        "packing/micro_batches": float(sum(report.micro_batches for report in replicas)),
        # Ranks wait for the slowest once per optimizer step, so the largest share counts, weighted by the step's work.
        "packing/imbalance": sum(c.work.imbalance * c.work.trained_flops for c in costs) / flops if flops else 1.0,
        "time/update_overhead_fraction": sum(c.overhead_s for c in costs) / sum(c.seconds for c in costs),
        "memory/trainer_peak_mib": max(peaks),
    } | {f"memory/rank_{rank}_peak_mib": peak for rank, peak in enumerate(peaks)}
