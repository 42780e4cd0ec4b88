"""Whether trainer ranks on this machine would run on CUDA."""

from __future__ import annotations

import ctypes
import importlib.util
import runpy
from pathlib import Path


def torch_has_cuda() -> bool:
    """As torch says; imports it (2 CPU-seconds). False without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def torch_would_have_cuda() -> bool:
    """The same without importing torch: it is a CUDA build, and the driver offers a device (CUDA_VISIBLE_DEVICES)."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return build["cuda"] is not None and _cuda_devices() > 0


def _cuda_devices() -> int:
    """Devices that the CUDA driver offers this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    started = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if started else 0
