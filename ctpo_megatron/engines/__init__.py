"""Engines: all vLLM engines of a run as one pool, the Ray that they run in, and how weights reach them.

`EnginePool` runs the engines; `Sampling` is the distribution to sample from. Importing this loads neither Ray nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.engines.tasks import Cancelled, FleetError, Sampling, WeightSyncError

if TYPE_CHECKING:
    from ctpo_megatron.engines.open import check_tokenizer, cluster_of, open_engines
    from ctpo_megatron.engines.pool import EnginePool
    from ctpo_megatron.engines.weight_client import WeightClient

_NEED_RAY = {
    "EnginePool": "pool",
    "WeightClient": "weight_client",
    "check_tokenizer": "open",
    "cluster_of": "open",
    "open_engines": "open",
}

__all__ = [
    "Cancelled",
    "EnginePool",
    "FleetError",
    "Sampling",
    "WeightClient",
    "WeightSyncError",
    "check_tokenizer",
    "cluster_of",
    "open_engines",
]


def __getattr__(name: str) -> Any:
    """Import what needs Ray only when it is asked for."""
    if name not in _NEED_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_RAY[name]}"), name)
