"""Run: where a run stands, and what it owns: directory, reporter, checkpoints, the ranks of the trainer.

`TrainerGroup` is the trainer on all ranks. `Run` is what rank zero does: it samples, publishes, evaluates and saves.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.run.checkpoints import Checkpoints
    from ctpo_megatron.run.directory import (
        RunDirectoryError,
        check_there,
        former_choice,
        is_finished,
        needed,
        open_run_directory,
        record_finish,
        take_over,
    )
    from ctpo_megatron.run.provenance import commit_of_code, describe_environment
    from ctpo_megatron.run.ranks import TrainerGroup
    from ctpo_megatron.run.reporter import Reporter
    from ctpo_megatron.run.run import Run, Services, TooManyFailed, start_services

_MODULES = {
    "checkpoints": ("Checkpoints",),
    "directory": (
        *("RunDirectoryError", "check_there", "former_choice", "is_finished", "needed", "open_run_directory"),
        *("record_finish", "take_over"),
    ),
    "provenance": ("commit_of_code", "describe_environment"),
    "ranks": ("TrainerGroup",),
    "reporter": ("Reporter",),
    "run": ("Run", "Services", "TooManyFailed", "start_services"),
}
"""Module -> the names that it has. Imported when first used: `ctpo sweep` needs no torch to see that a run is done."""


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
