"""Run: where a run stands, and what it owns: directory, reporter, checkpoints, the ranks of the trainer.

`TrainerGroup` is the trainer on all ranks, `Controller` what rank zero owns, `Run` the steps.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.run.controller import Controller, StopOrLostRank
    from ctpo_megatron.run.directory import is_finished, open_run_directory, record_finish
    from ctpo_megatron.run.persistence import Persistence
    from ctpo_megatron.run.ranks import TrainerGroup
    from ctpo_megatron.run.reporter import Reporter
    from ctpo_megatron.run.run import Run
    from ctpo_megatron.run.scheduler import stop_signal
    from ctpo_megatron.run.services import Services, start_services
    from ctpo_megatron.run.verdicts import TooManyFailed

_MODULES = {
    "Controller": "controller",
    "Persistence": "persistence",
    "Reporter": "reporter",
    "Run": "run",
    "Services": "services",
    "StopOrLostRank": "controller",
    "TooManyFailed": "verdicts",
    "TrainerGroup": "ranks",
    "is_finished": "directory",
    "open_run_directory": "directory",
    "record_finish": "directory",
    "start_services": "services",
    "stop_signal": "scheduler",
}

__all__ = [
    "Controller",
    "Persistence",
    "Reporter",
    "Run",
    "Services",
    "StopOrLostRank",
    "TooManyFailed",
    "TrainerGroup",
    "is_finished",
    "open_run_directory",
    "record_finish",
    "start_services",
    "stop_signal",
]


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
