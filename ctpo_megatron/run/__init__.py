"""Run: where a run stands, and what it owns: directory, reporter, checkpoints, the ranks of the trainer.

`TrainerGroup` is the trainer on all ranks, `Controller` what rank zero owns, `Run` the steps.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.run.controller import Controller, StopOrLostRank
    from ctpo_megatron.run.directory import (
        check_there,
        former_choice,
        is_finished,
        needed,
        open_run_directory,
        record_finish,
    )
    from ctpo_megatron.run.persistence import Persistence
    from ctpo_megatron.run.provenance import commit_of_code
    from ctpo_megatron.run.ranks import TrainerGroup
    from ctpo_megatron.run.reporter import Reporter
    from ctpo_megatron.run.run import Run
    from ctpo_megatron.run.scheduler import stop_signal
    from ctpo_megatron.run.services import Services, start_services
    from ctpo_megatron.run.verdicts import TooManyFailed

_MODULES = {
    "controller": ("Controller", "StopOrLostRank"),
    "directory": ("check_there", "former_choice", "is_finished", "needed", "open_run_directory", "record_finish"),
    "persistence": ("Persistence",),
    "provenance": ("commit_of_code",),
    "ranks": ("TrainerGroup",),
    "reporter": ("Reporter",),
    "run": ("Run",),
    "scheduler": ("stop_signal",),
    "services": ("Services", "start_services"),
    "verdicts": ("TooManyFailed",),
}
"""Module -> the names that it has."""


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
