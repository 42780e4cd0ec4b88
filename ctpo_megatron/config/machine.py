"""Whether this machine can train on CUDA, without importing torch; whether its temporary directory will do."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

from ctpo_megatron.config.problems import NO_VALUE, Problem

_LONGEST = 107 - len("/c0ffee00-0000-4000-8000-c0ffee000000")
"""Of the path of a Unix socket, what the names that vLLM gives its own leave; those of multiprocessing are shorter."""


def docstring_problem() -> Problem | None:
    """Why Ray, which adds to docstrings when it is imported, does not start: Python was told to leave them out."""
    if sys.flags.optimize < 2:
        return None
    message = "leaves out docstrings, without which Ray does not start"
    return Problem("PYTHONOPTIMIZE", message, "type unset PYTHONOPTIMIZE, or leave out -OO", sys.flags.optimize)


def temporary_problem() -> Problem | None:
    """Why engines and scorers cannot have their files and sockets in the temporary directory."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        given = os.environ.get("TMPDIR", NO_VALUE)
        return Problem("TMPDIR", f"{error.strerror}", "set it to a folder that can be written to", given)
    if (length := len(os.fsencode(folder))) <= _LONGEST:
        return None
    message = f"has {length} characters, and sockets below it fail beyond {_LONGEST}"
    return Problem("TMPDIR", message, "set it to a shorter path, e.g. /tmp", folder)


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
