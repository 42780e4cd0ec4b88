"""Engines: all vLLM engines of a run as one pool, the Ray that they run in, and how weights reach them.

`EnginePool` runs the engines; `Sampling` is the distribution to sample from. Importing this loads neither Ray nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.engines.stats import pool_stats
from ctpo_megatron.engines.tasks import EngineError, GroupFailed, GroupLost, GroupTask, Sampling

if TYPE_CHECKING:
    from ctpo_megatron.engines.handle import EngineHandle
    from ctpo_megatron.engines.open import cluster_of, open_engines
    from ctpo_megatron.engines.pool import EnginePool

_NEED_RAY = {
    "EngineHandle": "handle",
    "EnginePool": "pool",
    "cluster_of": "open",
    "open_engines": "open",
}

__all__ = [
    "EngineError",
    "EngineHandle",
    "EnginePool",
    "GroupFailed",
    "GroupLost",
    "GroupTask",
    "Sampling",
    "cluster_of",
    "give_way_to_engines",
    "open_engines",
    "pool_stats",
]


def give_way_to_engines() -> None:
    """Let engines on this machine's cores come before the calling thread; see `cpu.setup`, imported only here."""
    from ctpo_megatron.engines.cpu import setup

    setup.give_way_to_engines()


def __getattr__(name: str) -> Any:
    """Import lazily what most callers do not need."""
    if name not in _NEED_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_RAY[name]}"), name)
