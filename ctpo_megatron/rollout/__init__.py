"""Rollout: prompts in, groups of multi-turn trajectories out.

`RolloutFleet` runs the engines, `Replay` answers from a recording; `Sampling` is the distribution to sample from;
`rollout_metrics` summarizes groups.
The episode, tool and template modules are plain Python and can be imported without vLLM or Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ctpo_megatron.environments.tools import TOOL_SCHEMA
from ctpo_megatron.rollout.metrics import rollout_metrics
from ctpo_megatron.rollout.replay import Replay, ReplayError
from ctpo_megatron.rollout.source import Collector, Engines, Phase, RolloutSource, SampledRollouts, check_mismatch
from ctpo_megatron.rollout.tasks import Cancelled, Sampling

if TYPE_CHECKING:
    from ctpo_megatron.rollout.dispatch import GroupFailed
    from ctpo_megatron.rollout.fleet import RolloutFleet
    from ctpo_megatron.rollout.handle import FleetError, WeightSyncError

_LAZY = {
    "RolloutFleet": "ctpo_megatron.rollout.fleet",
    "GroupFailed": "ctpo_megatron.rollout.dispatch",
    "FleetError": "ctpo_megatron.rollout.handle",
    "WeightSyncError": "ctpo_megatron.rollout.handle",
}

__all__ = [
    "TOOL_SCHEMA",
    "Cancelled",
    "Collector",
    "Engines",
    "FleetError",
    "GroupFailed",
    "Phase",
    "Replay",
    "ReplayError",
    "RolloutFleet",
    "RolloutSource",
    "SampledRollouts",
    "Sampling",
    "WeightSyncError",
    "check_mismatch",
    "rollout_metrics",
]


def __getattr__(name: str) -> Any:
    """Import what needs Ray only when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
