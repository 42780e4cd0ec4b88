"""Cuts a batch of trajectories into optimizer steps, and each step into this rank's packed micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import PackedBatch, Trajectory, pack, split_evenly
from ctpo_megatron.objective import Denominators
from ctpo_megatron.policy.parallel import Layout


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step learns from: this rank's micro-batches, and denominators over all ranks."""

    micro_batches: list[PackedBatch]
    denominators: Denominators


def make_mini_batches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None,
    *,
    size: int,
    config: PolicyConfig,
    layout: Layout,
) -> list[MiniBatch]:
    """Consecutive runs of `size` trajectories, one per optimizer step, each shared out over data-parallel ranks.

    Every rank passes the same trajectories and keeps its share. advantages: one per trajectory; None: zeros
    (supervised). Raises ValueError when a mini-batch would leave a data-parallel rank without work.
    """
    result = []
    for start in range(0, len(trajectories), size):
        chunk = trajectories[start : start + size]
        if len(chunk) < layout.dp_size:
            raise ValueError(f"an optimizer step of {len(chunk)} trajectories cannot feed {layout.dp_size} replicas")
        mine = split_evenly(chunk, layout.dp_size)[layout.dp_rank]
        packed = pack(
            [chunk[i] for i in mine],
            None if advantages is None else [advantages[start + i] for i in mine],
            max_tokens=config.micro_batch_tokens,
            multiple_of=layout.tp_size if config.sequence_parallel else 1,
        )
        denominators = Denominators.of_lists(t.loss_mask for t in chunk)
        result.append(MiniBatch([micro.to(layout.device) for micro in packed], denominators))
    return result
