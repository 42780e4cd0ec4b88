"""Selects the backend: Triton on CUDA, Triton's interpreter on the CPU when requested, else plain torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from typing import Any, Literal, get_args

import torch

Backend = Literal["torch", "triton"]
ENVIRONMENT = "CTPO_KERNELS_BACKEND"


def require_torch(version: str) -> None:
    """Raise ImportError for a torch before 2.10.

    From 2.10 on `addmm` adds a product of bfloat16 matrices into a float32 one: weight gradients on CUDA need it.
    """
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        raise ImportError(
            f"ctpo_kernels needs torch 2.10 or newer (addmm with out_dtype and a float32 addend); this is {version}"
        )


require_torch(torch.__version__)


def interpreting() -> bool:
    """Return whether Triton kernels run in its interpreter (TRITON_INTERPRET=1, set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}


def choose(tensor: torch.Tensor) -> Backend:
    """Return the backend for work on `tensor`'s device and dtype.

    The environment variable CTPO_KERNELS_BACKEND, read at each call, names it; RuntimeError with the reason where that
    backend cannot run. Without it, Triton is used where it can run and computes in float32, else the torch backend. On
    a GPU, which the torch backend leaves mostly idle, that gives one warning with the reason. Raises RuntimeError when
    the interpreter is requested (TRITON_INTERPRET=1) and Triton is missing: tests would compare the torch backend with
    itself. ValueError for an unknown name.
    """
    return _choose(tensor.device, tensor.dtype)


def _choose(device: torch.device, dtype: torch.dtype) -> Backend:
    wanted = os.environ.get(ENVIRONMENT) or None
    if wanted not in (None, *get_args(Backend)):
        raise ValueError(f"{ENVIRONMENT}: unknown backend {wanted!r}; known: {', '.join(get_args(Backend))}")
    if wanted == "torch":
        return "torch"
    problem = _obstacle(device, dtype)
    if problem is None:
        return "triton"
    if wanted == "triton":
        raise RuntimeError(f"the triton backend was requested, but {problem}")
    if interpreting() and not _installed():
        raise RuntimeError("TRITON_INTERPRET=1 asks for the interpreter, but triton is not installed: unset it")
    if device.type == "cuda" and dtype != torch.float64:
        _warn_once(f"ctpo_kernels uses plain torch on {device}, many times slower than its Triton kernels: {problem}")
    return "torch"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _installed() -> bool:
    found = importlib.util.find_spec("triton")
    return found is not None and found.origin is not None  # an uninstall may leave a folder, which has no file


def _obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if not _installed():
        return "triton is not installed (pip install triton, or use the torch backend)"
    if dtype == torch.float64:
        return "its kernels compute in float32 and the tensors are float64: use the torch backend"
    if device.type == "cpu":
        if not interpreting():
            return (
                "the tensors are on the CPU: set TRITON_INTERPRET=1 before importing triton, or use the torch backend"
            )
        return None
    if device.type != "cuda":
        return f"it does not support device {device}: use the torch backend"
    if interpreting():
        return "TRITON_INTERPRET=1 is set and the tensors are on a GPU: unset it"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need compute capability 8.0 (Ampere) or newer: use the torch backend"
    return None


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of its first argument, a tensor; Triton alone would use the current device.

    Fused multiply-add changes the bits of a result, so it does not follow the default of a Triton version.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)
