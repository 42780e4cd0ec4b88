"""What an engine on a CPU is configured with, and which engine it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.engines.cpu.patches import apply
from ctpo_megatron.engines.setup import EngineSetup

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

_CONCURRENT_SHARE = 4
"""A step takes longer the more turns are in it, so a quarter of `max_num_seqs` keeps the cores busy."""


class CpuSetup(EngineSetup):
    """An engine on a CPU; with one worker, vLLM's core runs in the process of the engine."""

    def environment(self, engine: EngineConfig) -> dict[str, str]:
        """Environment variables that must be set before vLLM is imported."""
        return super().environment(engine) | {
            "OMP_NUM_THREADS": str(engine.threads),
            # Without it vLLM's CPU platform replaces the "uni" executor by "mp": a process more for each engine.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",  # no compiler needed at run time; never on CUDA
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Of a product for each number of tokens that was ever in a step, oneDNN would keep 1024: 400 MB.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        }

    def device_arguments(self, engine: EngineConfig, colocated: bool) -> dict[str, Any]:
        """Arguments that CPUs need. Raises ValueError without `rollout.engine.kv_cache_mb`."""
        if engine.kv_cache_mb is None:
            raise ValueError("rollout.engine.kv_cache_mb is required on CPU (vLLM would claim most of the machine)")
        return {
            # vLLM's CPU default of 128 would keep short prompts out of the prefix cache.
            "block_size": engine.block_size or 32,
            "enforce_eager": True,
            # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut into chunks; CPU generators
            # refuse and the engine dies. Whole prefills avoid it; a batch must then hold the longest sequence.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(engine.max_model_len, 4096),
        }

    def concurrent_turns(self, engine: EngineConfig) -> int:
        """Fewer than on a GPU, which computes all of `max_num_seqs` at once."""
        return max(1, engine.max_num_seqs // _CONCURRENT_SHARE)

    def make(self, arguments: AsyncEngineArgs, engine: EngineConfig) -> AsyncLLMEngine:
        """The engine that `apply` chooses, in a process where vLLM is patched for it."""
        return apply(arguments, engine)(arguments)
