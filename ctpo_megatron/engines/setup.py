"""How an engine is made: variables, arguments and the call of vLLM. Only `engine_setup` tells CPUs from GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Device, EngineConfig
from ctpo_megatron.config.schema import Config, RunConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

LOGGING_CONFIG = Path(__file__).with_name("vllm_logging.json")
"""`VLLM_LOGGING_CONFIG_PATH` of engines: the filter `Expected`, and what it leaves out, in each process of vLLM."""
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
        engine = config.rollout.engine
        arguments: dict[str, Any] = {
            "model": model_path,
            "dtype": config.engine_dtype,  # never vLLM's `auto`, which makes float32 models bfloat16
            "seed": config.run.seed,
            "max_model_len": engine.max_model_len,
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
        return arguments | self.device_arguments(config) | engine.extra  # what the user sets comes last

    def device_arguments(self, config: Config) -> dict[str, Any]:
        """Arguments that depend on the device. Raises ValueError as `arguments` does."""
        return {
            "max_num_seqs": config.rollout.engine.max_num_seqs,
            "gpu_memory_utilization": config.rollout.engine.gpu_memory_utilization,
            "enable_sleep_mode": config.placement.mode == "colocated",
            "enable_return_routed_experts": config.policy.router_replay,  # vLLM's model runner v2 alone has them
        }

    def make(self, arguments: AsyncEngineArgs, engine: EngineConfig, *, router_choices: bool = False) -> AsyncLLMEngine:
        """Return the engine; it loads the model. Raises what vLLM raises.

        router_choices: outputs have `routed_experts`. On a GPU `device_arguments` see to that.
        """
        from vllm.engine.async_llm_engine import AsyncLLMEngine

        return AsyncLLMEngine.from_engine_args(arguments)


def _profiler(run: RunConfig) -> dict[str, Any]:
    """vLLM's `profiler_config` of engines that are traced, which write into the run directory."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(RunPaths(run.directory).profile),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,  # it has no limit of steps
        "max_iterations": TRACED_STEPS,
    }


def engine_setup(device: Device) -> EngineSetup:
    """Return the setup for `device`: the one switch between CPUs and GPUs. On a GPU nothing of `engines.cpu` is
    imported.
    """
    if device == "cpu":
        from ctpo_megatron.engines.cpu import CpuSetup

        return CpuSetup()
    return EngineSetup()
