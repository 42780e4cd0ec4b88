"""Every patch of vLLM for engines on a CPU, and which engine to make."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ctpo_megatron.config import EngineConfig

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine


def apply(arguments: AsyncEngineArgs, engine: EngineConfig) -> Callable[[AsyncEngineArgs], AsyncLLMEngine]:
    """Patch vLLM in this process permanently, and return the function that makes an engine of `arguments`.

    arguments: changed in place; its `kernel_config` names the kernels. engine: whose `tensor_parallel_size` above 1
    leaves vLLM as it is. Its workers are processes of their own then, which no patch in this process reaches.
    """
    # Here, so that environment variables can be set between the import of this module and the import of vLLM.
    from vllm.engine.async_llm_engine import AsyncLLMEngine

    if engine.tensor_parallel_size > 1:
        make: Callable[[AsyncEngineArgs], AsyncLLMEngine] = AsyncLLMEngine.from_engine_args
        return make

    from ctpo_megatron.engines.cpu.core_client import in_process_engine
    from ctpo_megatron.engines.cpu.gemm import pad_small_products
    from ctpo_megatron.engines.cpu.output_batching import take_log_probs_of_many_tokens
    from ctpo_megatron.engines.cpu.rmsnorm import use_kernel_for_norms
    from ctpo_megatron.engines.cpu.sampler_seeds import draw_ahead

    pad_small_products()
    use_kernel_for_norms(arguments)
    draw_ahead()
    take_log_probs_of_many_tokens()
    return partial(in_process_engine, threads=engine.threads)
