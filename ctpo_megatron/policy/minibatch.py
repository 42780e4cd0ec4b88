"""Cuts a batch of trajectories into optimizer steps, and each step into this rank's packed micro-batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.config import ModelFacts, PolicyConfig, sequence_multiple
from ctpo_megatron.data import PackedBatch, PackingRules, Trajectory, micro_batch_count, pack, split_evenly
from ctpo_megatron.objective import Denominators
from ctpo_megatron.policy.flops import trajectory_flops
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.policy.workload import Workload, padded_tokens


@dataclass(frozen=True)
class MiniBatch:
    """What one optimizer step learns from: this rank's micro-batches, denominators over all ranks, and its size."""

    micro_batches: list[PackedBatch]
    denominators: Denominators
    work: Workload


def make_mini_batches(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | None,
    *,
    size: int,
    config: PolicyConfig,
    layout: Layout,
    facts: ModelFacts,
    padded_attention: bool,
) -> list[MiniBatch]:
    """Consecutive runs of `size` trajectories, one per optimizer step, each shared out over data-parallel ranks.

    Every rank passes the same trajectories and keeps its share; shares are balanced by model FLOPs. advantages: one per
    trajectory; None: zeros (supervised). padded_attention: attention pads within length classes (the local layer
    spec), which counts as computed tokens. Raises ValueError when a mini-batch would leave a data-parallel rank without
    work.
    """
    rules = packing_rules(config)
    result = []
    for start in range(0, len(trajectories), size):
        began = time.perf_counter()
        chunk = trajectories[start : start + size]
        if len(chunk) < layout.dp_size:
            raise ValueError(f"an optimizer step of {len(chunk)} trajectories cannot feed {layout.dp_size} replicas")
        flops = trajectory_flops(facts, chunk)
        shares = split_evenly(chunk, layout.dp_size, flops)
        mine = shares[layout.dp_rank]
        packed = pack(
            [chunk[i] for i in mine],
            None if advantages is None else [advantages[start + i] for i in mine],
            rules,
            at_least=_equal_count(chunk, shares, rules) if layout.ep_size > 1 else 0,
        )
        denominators = Denominators.of_lists(t.loss_mask for t in chunk)
        micro_batches = [micro.to(layout.device) for micro in packed]
        largest = max(sum(flops[i] for i in share) for share in shares)
        work = Workload(
            tokens=sum(map(len, chunk)),
            flops=sum(flops),
            imbalance=largest * layout.dp_size / sum(flops),
            computed_tokens=sum(padded_tokens(m.cu_seqlens) if padded_attention else m.num_tokens for m in packed),
            packing_s=time.perf_counter() - began,
        )
        result.append(MiniBatch(micro_batches, denominators, work))
    return result


def packing_rules(config: PolicyConfig) -> PackingRules:
    """What the layout asks of micro-batches: equal pieces for context parallelism, equal shares for sequence
    parallelism, whole rounds for virtual pipeline stages."""
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    return PackingRules(
        max_tokens=config.micro_batch_tokens * cp,
        sequence_multiple=sequence_multiple(config),
        batch_multiple=cp * tp if config.sequence_parallel else 1,
        count_multiple=config.pipeline_model_parallel_size if config.virtual_pipeline_model_parallel_size else 1,
    )


def _equal_count(chunk: Sequence[Trajectory], shares: Sequence[Sequence[int]], rules: PackingRules) -> int:
    """Micro-batches of the replica that needs most: experts are reached by all replicas in the same pass."""
    return max(micro_batch_count([chunk[i] for i in share], rules) for share in shares)
