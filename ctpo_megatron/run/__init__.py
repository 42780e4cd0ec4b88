"""Run: where a run stands, and what it owns: directory, reporter, checkpoints, the ranks of the trainer.

`TrainerGroup` is the trainer on all ranks. `Run` is what rank zero does: it samples, publishes, evaluates and saves.
Names are imported on first use: `ctpo sweep` needs no torch to see that a run is done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used

if TYPE_CHECKING:
    from ctpo_megatron.run.checkpoints import Checkpoints
    from ctpo_megatron.run.directory import (
        RunDirectoryError,
        former_choice,
        is_finished,
        open_run_directory,
        record_finish,
        take_over,
    )
    from ctpo_megatron.run.provenance import commit_of_code, describe_environment
    from ctpo_megatron.run.ranks import TrainerGroup
    from ctpo_megatron.run.reporter import Reporter
    from ctpo_megatron.run.run import Run, Services, TooManyFailed, start_services

__getattr__ = import_when_used(__name__)
