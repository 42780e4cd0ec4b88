"""Selects the backend: Triton on CUDA, Triton's interpreter on the CPU when requested, else plain torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor

Backend = Literal["torch", "triton"]
ENVIRONMENT = "CTPO_KERNELS_BACKEND"

_forced: Backend | None = None


def require_torch(version: str) -> None:
    """Raise ImportError for a torch before 2.10.

    From 2.10 on `addmm` adds a product of bfloat16 matrices into a float32 one: weight gradients on CUDA need it.
    """
    if tuple(map(int, version.split(".")[:2])) < (2, 10):
        raise ImportError(
            f"ctpo_kernels needs torch 2.10 or newer (addmm with out_dtype and a float32 addend); this is {version}"
        )


require_torch(torch.__version__)


@contextlib.contextmanager
def use_backend(name: Backend | None) -> Iterator[None]:
    """Use one backend inside the block, for every call of this process; None restores the automatic choice.

    Raises ValueError for an unknown name. What cannot run raises RuntimeError at the call that needs it.
    """
    global _forced
    if name is not None:
        _check(name, "use_backend")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter (TRITON_INTERPRET=1, set before triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}


def choose(tensor: torch.Tensor) -> Backend:
    """The backend for work on `tensor`'s device and dtype.

    A forced backend (`use_backend`, or the environment variable CTPO_KERNELS_BACKEND) is used or raises RuntimeError
    with the reason. Otherwise Triton is used where it can run and computes in float32, else the torch backend. On a
    GPU, which the torch backend leaves mostly idle, that gives one warning with the reason. Raises RuntimeError when
    the interpreter is requested (TRITON_INTERPRET=1) and Triton is missing: tests would compare the torch backend with
    itself.
    """
    return _choose(tensor.device, tensor.dtype)


def _choose(device: torch.device, dtype: torch.dtype) -> Backend:
    wanted = _forced or os.environ.get(ENVIRONMENT) or None
    if wanted is not None:
        _check(wanted, ENVIRONMENT)
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


def compiling(tensor: torch.Tensor) -> bool:
    """Whether a call is traced (torch.compile, torch.export) or only its shapes are computed (FakeTensor)."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def refuse_compiled(name: str, value: bool, effect: str) -> None:
    """Raises RuntimeError when `value` is set, which a compiled graph cannot serve: `effect` says why."""
    if value:
        raise RuntimeError(f"{name} cannot be compiled: it {effect}. Call outside of torch.compile, or do without it")


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of its first argument, a tensor; Triton alone would use the current device.

    Fused multiply-add changes the bits of a result, so it does not follow the default of a Triton version.
    """
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, enable_fp_fusion=True, **options)


def _check(name: str, where: str) -> None:
    if name not in get_args(Backend):
        raise ValueError(f"{where}: unknown backend {name!r}; known: {', '.join(get_args(Backend))}")
