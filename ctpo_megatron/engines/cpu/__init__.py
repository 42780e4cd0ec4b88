"""All that serves CPUs alone: how an engine on a CPU is made, and every patch of vLLM.

`engines.setup.engine_setup` is the one switch. It returns `CpuSetup`, which makes the engine by `apply`; on a GPU
nothing of this package is imported. Weight updates use `gemm` where a layer is on a CPU, the trainer
`yield_to_engines`. `tests/engines/test_vllm_private.py` lists every private name of vLLM that is patched or read.
"""

from ctpo_megatron.engines.cpu.setup import CpuSetup, apply

__all__ = ["CpuSetup", "apply"]
