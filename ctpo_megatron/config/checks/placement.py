"""Checks of `placement`: which side has which GPUs, and whether both sides' memory fits into each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ctpo_megatron.config.gpu_memory import GpuMemory, cheapest_changes, least_of_engine
from ctpo_megatron.config.memory import GIB, USABLE, gib
from ctpo_megatron.config.placement import Job, Placement
from ctpo_megatron.config.problems import Problem, error, warning
from ctpo_megatron.config.schema import Config
from ctpo_megatron.models import ModelSpec


def check_placement(config: Config, job: Job, *, cuda: bool) -> Iterator[Problem]:
    """Numbers of GPUs that contradict each other, the job or the node."""
    placement, rollout = config.placement, config.rollout
    if not cuda:
        if placement.mode == "colocated":
            yield error(config, "placement.mode", "engines sleep on CUDA only", "set disaggregated")
        return
    wanted, ranks = placement.trainer_gpus, job.node_ranks or job.world_size
    if wanted is not None and (wanted != ranks if job.node_ranks else ranks % wanted):
        fix = f"start {wanted} ranks a node: torchrun --nproc-per-node {wanted} (for a dry run: WORLD_SIZE={wanted})"
        yield error(config, "placement.trainer_gpus", f"but {ranks} trainer ranks run here", fix)
    if rollout.replay is None:
        yield from _engines(config, Placement.of(config, job), job.node_gpus)


def _engines(config: Config, placed: Placement, node_gpus: int | None) -> Iterator[Problem]:
    placement, rollout = config.placement, config.rollout
    each, given, nodes = rollout.engine.tensor_parallel_size, placement.engine_gpus, config.cluster.nodes
    if given is None:
        if rollout.engines == "auto":
            yield error(config, "rollout.engines", "needs to know how many GPUs there are", "set placement.engine_gpus")
    elif given % each:
        message = f"cannot be shared out among engines of {each} GPUs"
        yield error(
            config, "placement.engine_gpus", message, "make it a multiple of rollout.engine.tensor_parallel_size"
        )
    elif rollout.engines != "auto" and rollout.engines * each > given * nodes:
        message = f"x {each} GPUs each do not fit into placement.engine_gpus ({given}){_times(nodes)}"
        yield error(config, "rollout.engines", message, "set auto")
    elif rollout.engines != "auto" and rollout.engines * each < given * nodes:
        left = given * nodes - rollout.engines * each
        message = f"leaves {left} of placement.engine_gpus ({given}){_times(nodes)} without an engine"
        yield warning(config, "rollout.engines", message, "set auto")
    if placement.mode == "colocated" and len(placed.engines) > len(placed.trainer):
        message = f"but engines need {len(placed.engines)} GPUs, and the trainer has {len(placed.trainer)} to share"
        yield error(config, "placement.mode", message, "lower rollout.engines or placement.engine_gpus")
    elif node_gpus is not None and placed.gpus > node_gpus:
        sides = f"{len(placed.trainer)} for the trainer and {len(placed.engines)} for the engines"
        message = f"needs {placed.gpus} GPUs, {sides}, and this node shows {node_gpus}"
        yield error(config, "placement.mode", message, "start fewer trainer ranks, or set colocated")


def _times(nodes: int) -> str:
    return f" x cluster.nodes ({nodes})" if nodes > 1 else ""


def check_gpu_memory(config: Config, job: Job, spec: ModelSpec, *, gpu_gib: float) -> Iterator[Problem]:
    """The fullest moment of every GPU of the node against `gpu_gib`, with the cheapest changes that help."""
    share, least = config.rollout.engine.gpu_memory_utilization, least_of_engine(config, spec)
    if config.rollout.replay is None and share * gpu_gib * GIB < least:
        message = f"of {gpu_gib:g} GiB cannot hold the model and one longest sequence, {gib(least)} on each GPU"
        needed = math.ceil(100 * least / (gpu_gib * GIB)) / 100
        fix = f"set at least {needed:g}" if needed <= USABLE else "raise rollout.engine.tensor_parallel_size"
        yield error(config, "rollout.engine.gpu_memory_utilization", message, fix)
    fullest, limit = GpuMemory.of(config, job, spec, gpu_gib).fullest, USABLE * gpu_gib * GIB
    if fullest.bytes <= limit:
        return
    parts = " + ".join(f"{name} {gib(size)}" for name, size in fullest.parts.items())
    message = (
        f"{fullest.gpus}: {gib(fullest.bytes)} of {gpu_gib:g} GiB {fullest.when} ({parts}); "
        f"{1 - USABLE:.0%} are kept for CUDA, NCCL and fragmentation"
    )
    changes = cheapest_changes(config, job, spec, gpu_gib)
    enough = any(size <= limit for _, size in changes)
    named = ", ".join(f"{change} ({gib(size)})" for change, size in changes) or "none"
    advice = "cheapest changes" if enough else "no single change is enough, use more GPUs; those that save most"
    yield error(config, "placement.mode", message, f"{advice}: {named}")
