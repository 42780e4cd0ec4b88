"""How an engine is made: variables, log, arguments and the call of vLLM. Only `engine_setup` tells CPUs from GPUs."""

from __future__ import annotations

import json
import logging
import logging.config
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Device, EngineConfig, RolloutConfig
from ctpo_megatron.config.schema import Config, RunConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

LOGGING_CONFIG = Path(__file__).with_name("vllm_logging.json")
"""`VLLM_LOGGING_CONFIG_PATH` of engines: the filter below, and what it leaves out, in each process of vLLM."""
TRACED_STEPS = 256
"""Steps of an engine in a trace, the first since its beginning: a whole rollout has thousands."""


class EngineSetup:
    """An engine on GPUs, which is vLLM without changes. `engines.cpu.CpuSetup` has what CPUs need instead."""

    def environment(self, engine: EngineConfig) -> dict[str, str]:
        """Environment variables that must be set before vLLM is imported."""
        return {
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_LOGGING_CONFIG_PATH": str(LOGGING_CONFIG),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if engine.model_runner == "v2" else "0",  # vLLM would choose v2 on a GPU
            "TOKENIZERS_PARALLELISM": "false",
        }

    def arguments(self, config: Config, model_path: str) -> dict[str, Any]:
        """Keyword arguments of vLLM's AsyncEngineArgs. Raises ValueError when the device needs a missing setting."""
        engine, colocated = config.rollout.engine, config.placement.mode == "colocated"
        arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": config.engine_dtype,  # never vLLM's `auto`, which makes float32 models bfloat16
            "seed": config.run.seed,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": self.sequences(config.rollout),
            "scheduling_policy": "priority",  # by step: the trainer waits for the earliest one
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
        if config.run.profile_steps:
            arguments["profiler_config"] = _profiler(config.run)
        if config.policy.router_replay:
            arguments |= self.router_arguments()
        return arguments | self.device_arguments(engine, colocated) | engine.extra  # what the user sets comes last

    def device_arguments(self, engine: EngineConfig, colocated: bool) -> dict[str, Any]:
        """Arguments that depend on the device. Raises ValueError as `arguments` does.

        colocated: on the trainer's GPUs.
        """
        return {"gpu_memory_utilization": engine.gpu_memory_utilization, "enable_sleep_mode": colocated}

    def router_arguments(self) -> dict[str, Any]:
        """Arguments by which outputs have `routed_experts`. vLLM's model runner v2 alone has them."""
        return {"enable_return_routed_experts": True}

    def sequences(self, rollout: RolloutConfig) -> int:
        """Return how many sequences an engine decodes at once."""
        return rollout.engine.max_num_seqs

    def make(self, arguments: AsyncEngineArgs, engine: EngineConfig, *, router_choices: bool = False) -> AsyncLLMEngine:
        """The engine; it loads the model. Raises what vLLM raises.

        router_choices: outputs have `routed_experts`. On a GPU `router_arguments` see to that.
        """
        from vllm.engine.async_llm_engine import AsyncLLMEngine

        return AsyncLLMEngine.from_engine_args(arguments)


def _profiler(run: RunConfig) -> dict[str, Any]:
    """vLLM's `profiler_config` of engines that are traced (`traces.py`), which write into the run directory."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(RunPaths(run.directory).profile),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,  # it has no limit of steps
        "max_iterations": TRACED_STEPS,
    }


def engine_setup(device: Device) -> EngineSetup:
    """The setup for `device`: the one switch between CPUs and GPUs. On a GPU nothing of `engines.cpu` is imported."""
    if device == "cpu":
        from ctpo_megatron.engines.cpu import CpuSetup

        return CpuSetup()
    return EngineSetup()


class Expected(logging.Filter):
    """Passes every record but those that begin as one of `messages`, whose values say why each is expected."""

    def __init__(self, messages: Mapping[str, str]) -> None:
        super().__init__()
        self._beginnings = tuple(messages)

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginnings)


def leave_out_expected() -> None:
    """Keep messages that would look like failures out of this process's log, before vLLM is imported.

    vLLM itself reads `LOGGING_CONFIG` only when an engine is made.
    """
    settings = json.loads(LOGGING_CONFIG.read_text(encoding="utf-8"))
    messages = settings["filters"]["expected"]["messages"]
    print(f"# {len(messages)} kinds of messages are expected and left out: ctpo_megatron/engines/{LOGGING_CONFIG.name}")
    logging.config.dictConfig(settings)
