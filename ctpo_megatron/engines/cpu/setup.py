"""What an engine on a CPU is configured with, every patch of vLLM for it, and the trainer's priority next to it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.config.schema import Config
from ctpo_megatron.engines.setup import EngineSetup

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine

BEHIND_ENGINES = 5
"""Niceness of the trainer's main thread while engines on its machine sample ahead."""
_SHARE_AHEAD = 2
"""An engine that samples ahead decodes `max_num_seqs` divided by this at once.

A step takes longer the more sequences are in it. Two batches that share the engine equally would complete late and
together: the trainer would wait for the first one, and have the second one before it needs it.
Of two batches of `max_num_seqs` sequences, the first one is complete after 62 % of the CPU time of both; with all of
`max_num_seqs` it would be after 78 %. A quarter would cost a third more CPU time for both.
"""


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

    def device_arguments(self, config: Config) -> dict[str, Any]:
        """Arguments that CPUs need. vLLM refuses its own for `routed_experts` here, where `router_choices` serves."""
        engine, share = config.rollout.engine, _SHARE_AHEAD if config.rollout.ahead else 1
        assert engine.kv_cache_mb is not None, "the pool gives it (`CpuCache`): vLLM would claim most of the machine"
        return {
            "max_num_seqs": max(1, engine.max_num_seqs // share),
            # vLLM's CPU default of 128 would keep short prompts out of the prefix cache.
            "block_size": engine.block_size or 32,
            "enforce_eager": True,
            # vLLM 0.32 rewinds the generator of a seeded request whose prefill was cut into chunks; CPU generators
            # refuse and the engine dies. Whole prefills avoid it; a batch must then hold the longest sequence.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(engine.max_model_len, 4096),
        }

    def make(self, arguments: AsyncEngineArgs, engine: EngineConfig, *, router_choices: bool = False) -> AsyncLLMEngine:
        """Return the engine that `apply` chooses, in a process where vLLM is patched for it.

        router_choices: outputs have `routed_experts`. Raises ValueError for several workers.
        """
        return apply(engine, router_choices=router_choices)(arguments)


def apply(engine: EngineConfig, *, router_choices: bool = False) -> Callable[[AsyncEngineArgs], AsyncLLMEngine]:
    """Patch vLLM in this process permanently, and return the function that makes an engine.

    engine: whose `tensor_parallel_size` above 1 leaves vLLM as it is. Its workers are processes of their own then,
    which no patch in this process reaches. router_choices: see `CpuSetup.make`.
    """
    # Here, so that environment variables can be set between the import of this module and the import of vLLM.
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    if engine.tensor_parallel_size > 1:
        if router_choices:
            raise ValueError("policy.router_replay needs rollout.engine.tensor_parallel_size: 1 on a CPU")
        make: Callable[[AsyncEngineArgs], AsyncLLMEngine] = AsyncLLMEngine.from_engine_args
        return make

    from ctpo_megatron.engines.cpu.core_client import in_process_engine
    from ctpo_megatron.engines.cpu.gemm import pad_small_products

    pad_small_products()
    return partial(in_process_engine, threads=engine.threads, router_choices=router_choices)


def yield_to_engines() -> None:
    """Lower the priority of the calling thread permanently, so that engines on this machine run first.

    Threads that serve the engines keep theirs. A step takes as long as its slower side, which on a CPU is the engine:
    its core has one thread, and competes with programs of tools and with scorers. Does nothing on other systems than
    Linux, where threads have no niceness of their own.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, BEHIND_ENGINES))
