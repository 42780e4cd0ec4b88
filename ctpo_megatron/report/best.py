"""The best evaluated step of a run, and whether its checkpoint is there."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.run_paths import MARKER, RunPaths, step_name
from ctpo_megatron.report.run_data import RunData


@dataclass(frozen=True)
class Best:
    """value: of `measure`, the largest of the run, of equal ones the latest. last: of the last step that has it.

    checkpoint: complete, of that step; None where it was not saved or not kept.
    """

    step: int
    measure: str
    value: float
    last: float
    checkpoint: Path | None

    @property
    def where(self) -> str:
        """The checkpoint, or how the next run keeps it."""
        if self.checkpoint is not None:
            return str(self.checkpoint)
        return "its checkpoint is not there; checkpoint.keep_best: 1 keeps the best by checkpoint.best_metric"


def best_step(run: RunData) -> Best | None:
    """By `checkpoint.best_metric` where `keep_best` ranks checkpoints by it, else by the mean accuracy over all sources
    of held-out prompts. None where no step has that."""
    names, measure = run.accuracy_names, "held-out accuracy"
    if run.setting("checkpoint.keep_best"):
        measure = run.setting("checkpoint.best_metric")
        names = [measure]
    values = {
        record["step"]: statistics.fmean(record[name] for name in names)
        for record in run.metrics
        if names and all(record.get(name) is not None for name in names)
    }
    if not values:
        return None
    step = max(values, key=lambda step: (values[step], step))
    folder = RunPaths(run.directory).checkpoints / step_name(step)
    checkpoint = folder if (folder / MARKER).is_file() else None
    return Best(step, measure, values[step], values[max(values)], checkpoint)
