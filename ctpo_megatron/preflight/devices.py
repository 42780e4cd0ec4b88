"""GPUs and their driver, held against the CUDA that torch was built for; without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight.check import Gpu, MachineContext
from ctpo_megatron.preflight.packages import version_of
from ctpo_megatron.preflight.timeouts import GPU_QUERY_TIMEOUT_S

_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}
"""First driver branch of each major version of CUDA (NVIDIA, CUDA Compatibility, "minor version compatibility")."""


def gpus() -> list[Gpu] | str:
    """The GPUs of this node; a text says why they cannot be told."""
    if (program := shutil.which("nvidia-smi")) is None:
        return "no nvidia-smi"
    try:
        done = subprocess.run(
            [program, *_QUERY], capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    if done.returncode:
        return f"nvidia-smi: {(done.stdout + done.stderr).strip().splitlines()[-1:] or done.returncode}"
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    return [Gpu(name, float(mib) / 1024, driver) for name, mib, driver in rows]


def check_devices(context: MachineContext) -> Iterator[Problem]:
    """GPUs, their driver, and which layers and optimizer follow from what is installed."""
    found, cuda = context.gpus, context.cuda
    if isinstance(found, str) or not found:
        yield Problem("CUDA", f"none ({found or 'no GPU'}): everything runs on the CPU", severity="warning")
    else:
        yield passed("CUDA", ", ".join(f"{gpu.name} {gpu.gib:.0f} GiB" for gpu in found))
        yield _driver(found[0].driver, cuda)
    engine = not isinstance(found, str) and cuda is not None and version_of("transformer-engine") is not None
    apex = importlib.util.find_spec("amp_C") is not None
    layers = "Transformer Engine" if engine else "local (torch scaled_dot_product_attention)"
    optimizer = "Transformer Engine FusedAdam" if engine else "apex FusedAdam" if apex else "torch.optim.AdamW"
    yield passed("layer spec", layers)
    yield passed("optimizer", optimizer)


def torch_cuda() -> str | None:
    """The version of CUDA that torch was built for, from its file of versions."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return _built_for(Path(spec.submodule_search_locations[0]) / "version.py")


def _built_for(version_file: Path) -> str | None:
    """`cuda: Optional[str] = '12.8'` in a CUDA build of torch, `= None` elsewhere."""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def has_cuda_device() -> bool:
    """Whether torch is built for CUDA and the driver shows a device (`CUDA_VISIBLE_DEVICES` counts)."""
    return torch_cuda() is not None and _driver_shows_device()


def _driver_shows_device() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _driver(driver: str, cuda: str | None) -> Problem:
    if cuda is None:
        fix = "install the CUDA build of torch and vLLM (docs/install_cuda.md), or train on the CPU"
        return Problem("driver", f"{driver}, but torch is a build without CUDA", fix, severity="warning")
    least = _LEAST_DRIVER.get(cuda.split(".")[0], 0)
    if int(driver.split(".")[0]) < least:
        fix = f"install a driver of branch {least} or newer"
        return Problem("driver", f"{driver} is too old for CUDA {cuda}, which torch was built for", fix)
    return passed("driver", f"{driver}, for CUDA {cuda}")
