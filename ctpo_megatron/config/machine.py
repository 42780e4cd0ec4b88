"""Whether this machine can train on CUDA, asked without importing torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path


def has_cuda_device() -> bool:
    """Whether torch is built for CUDA and the driver shows a device (`CUDA_VISIBLE_DEVICES` counts)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    return _built_for_cuda(Path(spec.submodule_search_locations[0]) / "version.py") and _driver_shows_device()


def _built_for_cuda(version_file: Path) -> bool:
    """`cuda: Optional[str] = '12.8'` in a CUDA build of torch, `= None` elsewhere."""
    return re.search(r"^cuda\b.*=\s*['\"]\d", version_file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _driver_shows_device() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
