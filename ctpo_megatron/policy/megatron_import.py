"""Imports megatron-core without what no trainer uses: its timers import W&B, its decorators torch's compiler.

Together they are half of the CPU time that it takes to import a trainer on CPUs, and 80 MiB of each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ctpo_megatron.base.installed import hide_broken_te

_WANDB = "wandb"


CUDA = torch.cuda.is_available()


def import_megatron() -> None:
    """Import megatron-core, unless that has happened. Call before anything else of this package imports it.

    On a CPU the functions that megatron-core decorates with `torch.compile` run as they are written. The local layers
    call none of them, and no compiler of C++ need be installed.
    """
    hide_broken_te()
    compile_, wandb = torch.compile, sys.modules.get(_WANDB)
    if wandb is None:
        sys.modules[_WANDB] = None  # type: ignore[assignment] # the documented way to make an import fail
    if not CUDA:
        torch.compile = _as_written
    try:
        import megatron.core.models.gpt
        import megatron.core.timers  # noqa: F401
    finally:
        torch.compile = compile_
        if wandb is None:
            del sys.modules[_WANDB]


def _as_written(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Return what `torch.compile` is given, or a decorator that does."""
    return model if model is not None else _as_written
