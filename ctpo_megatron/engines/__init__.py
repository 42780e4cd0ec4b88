"""Engines: all vLLM engines of a run as one pool, the Ray that they run in, and how weights reach them.

`open_engines` opens an `EnginePool` as configured. A `RolloutEngine` is one engine, which also runs outside of Ray;
`engine_setup` has what it gives vLLM. `Sampling` is the distribution to sample from. Importing this loads neither Ray
nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.engines.setup import engine_setup
from ctpo_megatron.engines.tasks import (
    EngineDied,
    EngineError,
    EngineSpec,
    GroupFailed,
    GroupLost,
    GroupOutcome,
    GroupTask,
    Sampling,
    UpdateReport,
    pool_stats,
)

if TYPE_CHECKING:
    from ctpo_megatron.engines.engine import RolloutEngine
    from ctpo_megatron.engines.handle import EngineHandle
    from ctpo_megatron.engines.pool import EnginePool, open_engines
    from ctpo_megatron.engines.ray_runtime import RayRuntime, join_ray

_LATER = {
    "EngineHandle": "handle",
    "EnginePool": "pool",
    "RayRuntime": "ray_runtime",
    "RolloutEngine": "engine",
    "join_ray": "ray_runtime",
    "open_engines": "pool",
}

__all__ = [
    "EngineDied",
    "EngineError",
    "EngineHandle",
    "EnginePool",
    "EngineSpec",
    "GroupFailed",
    "GroupLost",
    "GroupOutcome",
    "GroupTask",
    "RayRuntime",
    "RolloutEngine",
    "Sampling",
    "UpdateReport",
    "engine_setup",
    "give_way_to_engines",
    "join_ray",
    "open_engines",
    "pool_stats",
]


def give_way_to_engines() -> None:
    """Let engines on this machine's cores come before the calling thread; see `cpu.setup`, imported only here."""
    from ctpo_megatron.engines.cpu import setup

    setup.give_way_to_engines()


def __getattr__(name: str) -> Any:
    """Import what loads Ray or an engine when it is first used: most callers do not need it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
