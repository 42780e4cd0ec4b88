"""Rollout: prompts in, groups of multi-turn trajectories out.

`RolloutFleet` runs the engines, `Replay` answers from a recording; `Sampling` is the distribution to sample from;
`rollout_metrics` summarizes groups.
Nothing here imports vLLM or Ray until a fleet is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.rollout.controller import AsyncRollouts
from ctpo_megatron.rollout.filters import Filters, filter_problem
from ctpo_megatron.rollout.metrics import rollout_metrics
from ctpo_megatron.rollout.quarantine import Quarantined, TooManyQuarantined
from ctpo_megatron.rollout.replay import Replay, ReplayError
from ctpo_megatron.rollout.source import Collector, Engines, Phase, RolloutSource, SampledRollouts, check_mismatch
from ctpo_megatron.rollout.tasks import Cancelled, FleetError, Sampling, WeightSyncError

if TYPE_CHECKING:
    from ctpo_megatron.rollout.fleet import RolloutFleet
    from ctpo_megatron.rollout.weight_client import WeightClient

__all__ = [
    "AsyncRollouts",
    "Cancelled",
    "Collector",
    "Engines",
    "Filters",
    "FleetError",
    "Phase",
    "Quarantined",
    "Replay",
    "ReplayError",
    "RolloutFleet",
    "RolloutSource",
    "SampledRollouts",
    "Sampling",
    "TooManyQuarantined",
    "WeightClient",
    "WeightSyncError",
    "check_mismatch",
    "filter_problem",
    "rollout_metrics",
]


_NEED_RAY = {"RolloutFleet": "fleet", "WeightClient": "weight_client"}


def __getattr__(name: str) -> Any:
    """Import what needs Ray only when it is asked for."""
    if name not in _NEED_RAY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_RAY[name]}"), name)
