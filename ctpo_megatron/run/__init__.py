"""Run: where a run stands and what it owns: directory, reporter, services of rank zero, checkpoints, preemption.

Each class owns one kind of state and is complete once made. `run.directory` and `run.owner` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.run.bridge import Bridge
    from ctpo_megatron.run.directory import RunDirectoryError, is_finished, open_run_directory, record_finish
    from ctpo_megatron.run.persistence import Persistence
    from ctpo_megatron.run.preemption import EXIT_STATUS, Preemption
    from ctpo_megatron.run.reporter import RankZeroReporter, Reporter, open_reporter
    from ctpo_megatron.run.services import Services, start_services
    from ctpo_megatron.run.state import RunState, StopOrLostRank

_MODULES = {
    "EXIT_STATUS": "preemption",
    "Bridge": "bridge",
    "Persistence": "persistence",
    "Preemption": "preemption",
    "RankZeroReporter": "reporter",
    "Reporter": "reporter",
    "RunDirectoryError": "directory",
    "RunState": "state",
    "StopOrLostRank": "state",
    "Services": "services",
    "is_finished": "directory",
    "open_reporter": "reporter",
    "open_run_directory": "directory",
    "record_finish": "directory",
    "start_services": "services",
}

__all__ = [
    "EXIT_STATUS",
    "Bridge",
    "Persistence",
    "Preemption",
    "RankZeroReporter",
    "Reporter",
    "RunDirectoryError",
    "RunState",
    "Services",
    "StopOrLostRank",
    "is_finished",
    "open_reporter",
    "open_run_directory",
    "record_finish",
    "start_services",
]


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
