"""GPUs of this node, and what torch was built for. Only `torch_has_cuda` and `visible_gpus` import torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.installed import is_installed

_QUERY = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
GPU_QUERY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Gpu:
    """A GPU of this node, with the name and size that the driver gives."""

    name: str
    gib: float
    driver: str


def gpus() -> list[Gpu] | str:
    """Return the GPUs of this node; a text says why they are unknown."""
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


def torch_cuda() -> str | None:
    """Return the version of CUDA that torch was built for, from its file of versions."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        return None
    return _built_for(Path(spec.submodule_search_locations[0]) / "version.py")


def _built_for(version_file: Path) -> str | None:
    """`cuda: Optional[str] = '12.8'` in a CUDA build of torch, `= None` elsewhere."""
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def has_cuda_device() -> bool:
    """Return whether torch is built for CUDA and the driver shows a device (`CUDA_VISIBLE_DEVICES` counts)."""
    return torch_cuda() is not None and driver_shows_device()


def driver_shows_device() -> bool:
    """Return whether the driver shows this process a device (`CUDA_VISIBLE_DEVICES` counts)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def torch_has_cuda() -> bool:
    """Return whether torch shows a GPU; False without it. Takes 2 CPU-seconds, for torch is imported."""
    return visible_gpus() > 0


def visible_gpus() -> int:
    """GPUs that torch shows on this node; 0 without torch."""
    if not is_installed("torch"):
        return 0
    import torch

    return torch.cuda.device_count()
