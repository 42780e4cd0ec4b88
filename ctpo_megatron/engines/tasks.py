"""What travels between the fleet and its engines, and what an engine is configured with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import ToolCall, Trajectory
from ctpo_megatron.engines.expected import LOGGING_CONFIG

Device = Literal["cpu", "cuda"]
Transport = Literal["file", "tcp", "nccl", "nccl_m2n", "ipc"]

INITIAL_VERSION = 0
"""Version of the weights an engine loads from its model directory, before the first update."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What every engine of a pool is created from.

    model_path: Hugging Face directory, absolute. run_seed: part of every sampling seed. sandbox_url: None: of the
    engine's own node. log_mark: tells an engine on a cluster whether its node sees `log_dir` (`rollout.logs`).
    """

    config: Config
    model_path: str
    run_seed: int
    sandbox_url: str | None
    log_dir: Path
    device: Device = "cpu"
    transport: Transport = "file"
    log_mark: str = ""

    @property
    def resources(self) -> dict[str, int]:
        """What Ray sets aside for one engine."""
        engine = self.config.rollout.engine
        if self.device == "cuda":
            return {"CPU": 1, "GPU": engine.tensor_parallel_size}
        return {"CPU": engine.threads, "GPU": 0}

    def log_path(self, index: int) -> Path:
        """The log of engine number `index`."""
        return self.log_dir / f"rollout_engine_{index}.log"


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Where an engine runs: Ray's node, its address, and the log as that node names it."""

    node_id: str
    address: str
    log_path: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling distribution. temperature 0: greedy; top_k 0: no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class GroupTask:
    """One prompt to be played once for each index in `samples`.

    early: finished samples can be fetched before the group is complete (`RolloutEngine.take_finished`). version: of the
    weights that its engine was told to take before: older ones play none of it.
    """

    prompt: Prompt
    step: int
    samples: tuple[int, ...]
    sampling: Sampling
    early: bool = False
    version: int = INITIAL_VERSION


@dataclass(slots=True)
class GroupOutcome:
    """What became of a GroupTask: all trajectories, or the reason why there are none and the tool calls made."""

    trajectories: list[Trajectory] | None
    failure: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class FleetError(RuntimeError):
    """The engine pool cannot continue; the message names the engine, the cause and where to look."""


class WeightSyncError(FleetError):
    """An engine does not hold the weights it was sent."""


class EngineLate(FleetError):
    """An engine did not finish a weight update in time."""


class Cancelled(Exception):
    """Sampling was cancelled."""


class EngineDied(RuntimeError):
    """The engine core behind a living actor is gone; the actor is of no further use."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """An engine's own account of a weight update. parts: fields of each `Part` that its workers keep. seconds: how long
    it took, where the engine led it."""

    version: str
    parts: list[tuple[str, str, bool, int]]
    seconds: float = 0.0


def choose_transport(config: Config, device: Device, *, cluster: bool) -> Transport:
    """The weight transport for engines on `device`; cluster: Ray is the cluster of `RAY_ADDRESS`, on several nodes."""
    if config.rollout.weights.transport != "auto":
        return config.rollout.weights.transport
    if device == "cuda":
        return "ipc" if config.placement.mode == "colocated" else "nccl"
    return "tcp" if cluster else "file"


def engine_environment(device: Device, engine: EngineConfig) -> dict[str, str]:
    """Environment variables that must be set before vLLM is imported."""
    env = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_CONFIG_PATH": str(LOGGING_CONFIG),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if engine.model_runner == "v2" else "0",  # left to vLLM, a GPU gets another one
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(engine.threads),
            # Without it vLLM's CPU platform replaces the "uni" executor by "mp": a process more for each engine.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # no compiler needed at run time; never on CUDA
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Of a product for each number of tokens that was ever in a step, oneDNN would keep 1024: 400 MB.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        }
    return env


def engine_arguments(config: Config, model_path: str, device: Device) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. Raises ValueError when the CPU needs a setting that is missing."""
    engine = config.rollout.engine
    arguments: dict[str, Any] = {
        "model": model_path,
        "dtype": engine.dtype,
        "seed": config.run.seed,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "distributed_executor_backend": "uni" if engine.tensor_parallel_size == 1 else "mp",
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "generation_config": "vllm",  # sampling parameters come from us alone
        "worker_extension_cls": "ctpo_megatron.engines.weights.receiver.WorkerExtension",
    }
    if engine.kv_cache_mb is not None:
        arguments["kv_cache_memory_bytes"] = engine.kv_cache_mb << 20
    if engine.block_size is not None:
        arguments["block_size"] = engine.block_size
    if device == "cuda":
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
        arguments["enable_sleep_mode"] = config.placement.mode == "colocated"
        return arguments | engine.extra
    if engine.kv_cache_mb is None:
        raise ValueError("rollout.engine.kv_cache_mb is required on CPU (vLLM would claim most of the machine)")
    # vLLM's CPU default of 128 would keep short prompts out of the prefix cache.
    arguments.setdefault("block_size", 32)
    arguments["enforce_eager"] = True
    # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut into chunks; CPU generators refuse and
    # the engine dies. Whole prefills avoid it; a batch must then hold the longest sequence.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(engine.max_model_len, 4096)
    return arguments | engine.extra
