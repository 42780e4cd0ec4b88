"""What runs in a process of its own, in the environment for GPUs: `python -m tests.cuda_environment.probes NAME ...`.

What a library takes for its platform stays for the life of its process. The last line of output is JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

H100 = {"count": 8, "capability": (9, 0), "name": "NVIDIA H100 80GB HBM3", "memory": 80 << 30}


def imported(module: str) -> str:
    import torch  # noqa: F401 - as in every process of ours: it loads libraries that others do not look for

    importlib.import_module(module)
    return module


def libraries(folder: str) -> dict[str, Any]:
    """Load every shared library below a folder, all symbols at once; which cannot be, and how many can."""
    import torch  # noqa: F401
    import tvm_ffi  # noqa: F401 - as xgrammar does before it loads its library

    refused, loaded = {}, 0
    for path in sorted(Path(folder).rglob("*.so*")):
        if path.name == "libjemalloc.so":  # for LD_PRELOAD
            continue
        try:
            ctypes.CDLL(str(path), os.RTLD_NOW)
            loaded += 1
        except OSError as error:
            refused[str(path)] = str(error)
    return {"refused": refused, "loaded": loaded}


def operators() -> dict[str, int]:
    """How many operators of torch the libraries of vLLM register, by namespace."""
    import torch
    import vllm._C_stable_libtorch
    import vllm.vllm_flash_attn._vllm_fa3_C  # noqa: F401

    names = [name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()]
    return Counter(name for name in names if name.startswith(("_C", "_vllm_fa3")) or name == "_moe_C")


def pretend_h100() -> None:
    """vLLM's wrapper of NVML, and Triton's driver, answer as eight H100 would. Comes before the rest of vLLM."""
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.is_active = staticmethod(lambda: True)
    from vllm.third_party import pynvml

    class Memory:
        total, free, used = H100["memory"], H100["memory"] - (1 << 30), 1 << 30

    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda *_: None,
        "nvmlShutdown": lambda *_: None,
        "nvmlDeviceGetCount": lambda: H100["count"],
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCudaComputeCapability": lambda _: H100["capability"],
        "nvmlDeviceGetName": lambda _: H100["name"],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle:08d}",
        "nvmlDeviceGetMemoryInfo": lambda _: Memory,
        "nvmlDeviceGetP2PStatus": lambda *_: 0,
    }
    for name, answer in answers.items():
        setattr(pynvml, name, answer)


def engine(config_path: str, model: str, mode: str, *overrides: str) -> dict[str, Any]:
    """vLLM's whole configuration of the arguments that our engines get on an H100."""
    pretend_h100()
    from ctpo_megatron.config import choose_transport, load_config
    from ctpo_megatron.engines import engine_setup

    config = load_config(
        Path(config_path),
        [f"placement.mode={mode}", "rollout.engine.kv_cache_mb=null", f"model.path={model}", *overrides],
    )
    setup = engine_setup("cuda")
    os.environ.update(setup.environment(config.rollout.engine))
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    transport = choose_transport(config.rollout.weights, config.placement, "cuda", cluster=False)
    arguments = AsyncEngineArgs(
        weight_transfer_config=WeightTransferConfig(backend=transport), **setup.arguments(config, model)
    )
    made = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return {
        "cuda": current_platform.is_cuda(),
        "transport": transport,
        "v2 runner": made.use_v2_model_runner,
        "graphs": made.compilation_config.cudagraph_mode.name,
        "sleep": made.model_config.enable_sleep_mode,
        "log-probs": str(made.model_config.logprobs_mode),
        "experts": made.aux_output_config.enable_return_routed_experts,
    }


def transformer_engine(distributed: str) -> dict[str, Any]:
    """Our model with Transformer Engine's layers in host memory: weights in and out, optimizer, and its checkpoints.

    distributed: "distributed", or "each rank" for an optimizer that is whole on each rank.
    """
    import torch

    from ctpo_megatron.config import OptimizerConfig, PolicyConfig
    from ctpo_megatron.policy import Trainer, destroy_distributed, device, init_distributed
    from tests.policy import models

    claimed = dataclasses.replace(device.capabilities(), cuda=True, transformer_engine=True, packed_attention=True)
    flags = device.transformer_flags

    def on_the_host(*, te_layers: bool) -> dict[str, Any]:
        return {**flags(te_layers=te_layers), "use_cpu_initialization": True}

    device.capabilities = lambda: claimed
    device.transformer_flags = on_the_host
    config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=distributed == "distributed")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        models.build("qwen3-tied", model, layers=2)
        layout = init_distributed(config, seed=0)
        torch.cuda.is_available, torch.cuda.get_device_capability = (lambda: True), (lambda *_: (9, 0))

        def trainer() -> tuple[Any, Any]:
            made = Trainer(config, layout, model, temperature=1.0)
            made.use_optimizer(OptimizerConfig(lr=1e-3), 4)
            return made, _inner_optimizer(made)

        policy, adam = trainer()
        kinds = sorted({type(part).__name__ for part in policy._model.gpt[0].modules()})
        _fill(adam)
        written = policy.save(Path(folder) / "checkpoint", 3, {"step": 3})
        other, loaded = trainer()
        other.load(written)
        equal = all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.weights(), other.weights(), strict=True))
        same_state = _state(adam) == _state(loaded)
        destroy_distributed()
    return {
        "layers": [kind for kind in kinds if kind.startswith("TE")],
        "Adam": f"{type(adam).__module__}.{type(adam).__name__}",
        "weights equal": equal,
        "state equal": same_state,
    }


def _inner_optimizer(policy: Any) -> Any:
    return policy._optimizer_steps.optimizer.chained_optimizers[0].optimizer


def _fill(adam: Any) -> None:
    """What three steps leave. Transformer Engine's Adam makes its moments in the first."""
    for group in adam.param_groups:
        group["step"] = 3
        for parameter in group["params"]:
            adam.initialize_state(parameter, store_param_remainders=False)
            adam.state[parameter]["exp_avg"].fill_(0.25)


def _state(adam: Any) -> list[Any]:
    moments = [adam.state[parameter]["exp_avg"] for group in adam.param_groups for parameter in group["params"]]
    return [
        [group.get("step") for group in adam.param_groups],
        [(tuple(moment.shape), str(moment.dtype), float(moment.double().sum())) for moment in moments],
    ]


PROBES: dict[str, Callable[..., Any]] = {
    "imported": imported,
    "libraries": libraries,
    "operators": operators,
    "engine": engine,
    "transformer_engine": transformer_engine,
}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
