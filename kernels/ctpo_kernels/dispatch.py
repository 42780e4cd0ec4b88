"""Which implementation runs: Triton on CUDA, Triton's interpreter on CPU when asked for, else the torch twin."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Literal, get_args

import torch

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

    Forced (`use_backend`, or the environment variable CTPO_KERNELS_BACKEND): that one, or RuntimeError with the reason
    why it cannot run. Otherwise Triton where it can run and computes in float32, else the torch twin.
    """
    wanted = _forced or os.environ.get(ENVIRONMENT) or None
    if wanted is not None:
        _check(wanted, ENVIRONMENT)
    if wanted == "torch":
        return "torch"
    problem = _obstacle(tensor)
    if problem is None:
        return "triton"
    if wanted == "triton":
        raise RuntimeError(f"the triton backend was asked for, but {problem}")
    return "torch"


def _obstacle(tensor: torch.Tensor) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton, or use the torch backend)"
    if tensor.dtype == torch.float64:
        return "its kernels compute in float32 and the tensors are float64: use the torch backend"
    if tensor.device.type == "cpu":
        if not interpreting():
            return (
                "the tensors are on the CPU: set TRITON_INTERPRET=1 before importing triton, or use the torch backend"
            )
        return None
    if tensor.device.type != "cuda":
        return f"it does not support device {tensor.device}: use the torch backend"
    if interpreting():
        return "TRITON_INTERPRET=1 is set and the tensors are on a GPU: unset it"
    if torch.cuda.get_device_capability(tensor.device) < (8, 0):
        return "its kernels need compute capability 8.0 (Ampere) or newer: use the torch backend"
    return None


def _check(name: str, where: str) -> None:
    if name not in get_args(Backend):
        raise ValueError(f"{where}: unknown backend {name!r}; known: {', '.join(get_args(Backend))}")
