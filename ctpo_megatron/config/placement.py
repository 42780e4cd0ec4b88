"""What follows from layout and placement: ranks of the job, GPUs of each side, padding, whether prefixes are shared."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.rollout_schema import PlacementConfig, Transport, WeightsConfig
from ctpo_megatron.config.schema import Config, PolicyConfig

Device = Literal["cpu", "cuda"]
NEED_TE = frozenset({"layernorm", "moe_act"})
"""Recompute modules that Megatron-Core offers with Transformer Engine's layers only."""


def sequence_multiple(policy: PolicyConfig) -> int:
    """Multiple that packed sequences are padded to: two equal pieces per context-parallel rank, and
    `pad_to_multiple`."""
    pieces = 2 * policy.context_parallel_size if policy.context_parallel_size > 1 else 1
    return math.lcm(pieces, policy.pad_to_multiple)


def against_shared_prefixes(policy: PolicyConfig) -> str:
    """Return why passes compute every token of every sequence, though some have the same history; "" where they
    do not.
    """
    reasons = {
        "policy.share_prefixes is off": policy.share_prefixes == "off",
        "sequences are split (policy.context_parallel_size)": policy.context_parallel_size > 1,
        "experts are replayed (policy.router_replay)": policy.router_replay,
        "sequences are padded (policy.pad_to_multiple)": policy.pad_to_multiple > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def engine_count(config: Config) -> int:
    """`rollout.engines`; for `auto`, one for each `tensor_parallel_size` GPUs of a node's `engine_gpus`."""
    if config.rollout.engines != "auto":
        return config.rollout.engines
    of_node = (config.placement.engine_gpus or 0) // config.rollout.engine.tensor_parallel_size
    return config.cluster.nodes * max(1, of_node)


def evaluates(config: Config) -> bool:
    """Return whether a run evaluates at all; one that replays a recording does with `eval.every` alone."""
    return bool(config.data.eval) and (config.rollout.replay is None or config.eval.every > 0)


def needs_engines(config: Config) -> bool:
    """Return whether a run starts engines, which sample or, next to a recording, evaluate."""
    return config.rollout.replay is None or evaluates(config)


def shares_gpus(config: Config) -> bool:
    """Return whether engines and trainer take turns on the same GPUs."""
    return config.placement.mode == "colocated" and needs_engines(config)


def choose_transport(weights: WeightsConfig, placement: PlacementConfig, device: Device) -> Transport:
    """Return what carries weights to engines on `device`."""
    if weights.transport != "auto":
        return weights.transport
    if device == "cuda":
        return "ipc" if placement.mode == "colocated" else "nccl"
    return "tcp"


@dataclass(frozen=True)
class Job:
    """The trainer's ranks, in total and per node (None: unknown, all on one), and the visible GPUs of a node.

    cuda: it runs on GPUs.
    """

    world_size: int
    node_ranks: int | None = None
    node_gpus: int | None = None
    cuda: bool = False

    @classmethod
    def here(cls, config: Config, *, cuda: bool, node_gpus: int | None = None, planned: bool = True) -> Job:
        """As torchrun says; else what the configuration asks for on CUDA, or one rank. Raises as `world_size`.

        planned: nothing is started. A run without torchrun is of one rank, whatever is configured.
        """
        ranks, asked = node_ranks(), config.placement.trainer_gpus
        if planned and cuda and asked is not None and "WORLD_SIZE" not in os.environ:
            return cls(asked * config.cluster.nodes, asked, node_gpus, cuda)
        return cls(world_size(), ranks, node_gpus, cuda)


@dataclass(frozen=True)
class Placement:
    """Indices among the visible GPUs of the node; engines has none where a run starts no engine."""

    trainer: range
    engines: range

    @classmethod
    def of(cls, config: Config, job: Job) -> Placement:
        """Return the trainer's GPUs: the first ones, one for each of its ranks on this node."""
        trainer = range(config.placement.trainer_gpus or job.node_ranks or job.world_size)
        of_node = -(-engine_count(config) // config.cluster.nodes)
        count = config.placement.engine_gpus or of_node * config.rollout.engine.tensor_parallel_size
        if not needs_engines(config):
            return cls(trainer, range(0))
        first = 0 if config.placement.mode == "colocated" else len(trainer)
        return cls(trainer, range(first, first + count))

    @property
    def gpus(self) -> int:
        """Number of GPUs that the node needs."""
        return max(self.trainer.stop, self.engines.stop)

    def engine_devices(self, visible: str | None) -> str:
        """`CUDA_VISIBLE_DEVICES` for the engines; visible: the job's value (None: all GPUs of the node).

        Raises ValueError when the job does not have that many.
        """
        if visible is None:
            return ",".join(str(gpu) for gpu in self.engines)
        names = [name.strip() for name in visible.split(",") if name.strip()]
        if len(names) < self.engines.stop:
            raise ValueError(f"the engines need GPU {self.engines.stop - 1} of CUDA_VISIBLE_DEVICES={visible}")
        return ",".join(names[self.engines.start : self.engines.stop])


_OF_A_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_problem(*, planned: bool) -> Problem | None:
    """Return the problem with an environment that has some of torchrun's variables, but not all, or no ranks in them.

    planned: nothing is started, and WORLD_SIZE alone is the size of the job to plan for.
    """
    missing = [name for name in _OF_A_RANK if name not in os.environ]
    name = "RANK" if "RANK" in os.environ else "WORLD_SIZE"
    if not missing:
        return next(filter(None, map(_no_rank, ("RANK", "LOCAL_RANK"))), None)
    if name == "WORLD_SIZE" and (planned or world_size() == 1):
        return None
    message = f"makes this process a rank of a job, which needs {', '.join(missing)}, too"
    return Problem(name, message, f"type unset {name}, or start the run with torchrun", os.environ[name])


def _no_rank(name: str) -> Problem | None:
    text, ranks = os.environ.get(name, "0"), world_size()
    if text.isdecimal() and int(text) < ranks:
        return None
    message = f"is not the number of one of {ranks} ranks, which are counted from 0"
    return Problem(name, message, f"type unset {name}, or start the run with torchrun", text)


def world_size() -> int:
    """Ranks of this job: WORLD_SIZE as torchrun sets it, else 1. Raises ConfigError if it is not a number."""
    return _count("WORLD_SIZE") or 1


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def node_ranks() -> int | None:
    """Ranks of this node: LOCAL_WORLD_SIZE; None without torchrun. Raises as `world_size`."""
    return _count("LOCAL_WORLD_SIZE")


def _count(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not (text.isdecimal() and int(text)):
        raise ConfigError([Problem(name, "is not a number of ranks", f"give 1 or more, or type unset {name}", text)])
    return None if text is None else int(text)
