"""What travels between the pool and its engines, and what an engine is configured with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import CpuCache, Device, Transport, free_memory, spec_for
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tool_call import TOOL_STATUSES, ToolCall
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.environments import Sampling as Sampling

if TYPE_CHECKING:
    from ctpo_megatron.engines.weights.checksums import Sums

log = logging.getLogger(__name__)

CORE_SHUTDOWN_S = 2.0
"""For the current step of an engine core and the release of its model."""
INITIAL_VERSION = 0
"""Version of the weights an engine loads from its model directory, before the first update."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine of a pool is made from.

    sandbox_url: None: the sandbox of the engine's own node. log_dir: folder of logs; a node that does not see it writes
    them elsewhere. driver: the process that engines of a private Ray end with; None: Ray is a cluster's.
    """

    config: Config
    sandbox_url: str | None
    log_dir: Path
    device: Device = "cpu"
    transport: Transport = "tcp"
    driver: int | None = None

    @property
    def model_path(self) -> str:
        """Hugging Face directory, absolute."""
        return str(Path(self.config.model.path).absolute())

    @property
    def resources(self) -> dict[str, int]:
        """What Ray sets aside for one engine."""
        engine = self.config.rollout.engine
        if self.device == "cuda":
            return {"CPU": 1, "GPU": engine.tensor_parallel_size}
        return {"CPU": engine.threads, "GPU": 0}

    def with_cache(self) -> EngineSpec:
        """With the size of an engine's KV cache on this CPU, which is logged, where it is not configured."""
        if self.device != "cpu" or self.config.rollout.engine.kv_cache_mb is not None:
            return self
        cache = CpuCache.of(self.config, spec_for(self.config), free_memory())
        log.info("engines: a KV cache of %d MiB each (rollout.engine.kv_cache_mb; %s)", cache.mb, cache)
        engine = self.config.rollout.engine.model_copy(update={"kv_cache_mb": cache.mb})
        rollout = self.config.rollout.model_copy(update={"engine": engine})
        return replace(self, config=self.config.model_copy(update={"rollout": rollout}))

    def log_path(self, index: int) -> Path:
        """The log of engine number `index`."""
        return LogPaths(self.log_dir).engine(index)


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Where an engine runs: the address of its node, and the log as that node names it."""

    address: str
    log_path: str


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One prompt to be sampled once for each index in `samples`.

    version: of the weights that its engine is to take before: older ones sample none of it. occurrence: as in
    `trajectory_seed`.
    """

    prompt: Prompt
    step: int
    samples: tuple[int, ...]
    sampling: Sampling
    version: int = INITIAL_VERSION
    occurrence: int = 0


@dataclass(slots=True)
class GroupOutcome:
    """What became of a GroupTask: all trajectories, or the reason why there are none and the tool calls made."""

    trajectories: list[Trajectory] | None
    failure: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class EngineError(RuntimeError):
    """The engines cannot continue; the message names the engine, the cause and where to look."""


class EngineDied(RuntimeError):
    """The engine core behind a living actor is gone; the actor is of no further use.

    Ours, as the trainer would import all of vLLM to unpickle vLLM's own exception.
    """


class GroupFailed(RuntimeError):
    """An episode raised; the message is what. An exception of users' code itself does not reach the trainer.

    There its methods would run, and it may not be loadable.
    """


class GroupLost(GroupFailed):
    """Another attempt would fail as well."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """An engine's own account of a weight update. sums: of what each of its workers has received. seconds: how long it
    took, where the engine led it."""

    version: str
    sums: list[Sums]
    seconds: float = 0.0


def pool_stats(counts: Mapping[str, float]) -> dict[str, float]:
    """Every count of `EnginePool.stats`, absent ones as 0, and the rate of the weight updates where there were any."""
    names = ["group_retries", "late_groups", "quarantined", "engine_restarts", "sync_s", "sync_bytes"]
    names += [f"lost_{status}" for status in TOOL_STATUSES]
    stats = dict.fromkeys(names, 0.0) | {name: float(count) for name, count in counts.items()}
    if stats["sync_bytes"]:
        stats["sync_gb_per_s"] = stats["sync_bytes"] / 1e9 / stats["sync_s"]
    return stats
