"""The models that a run has exported, each with the RL step of its weights, and the steps of its checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.base.files import read_note
from ctpo_megatron.base.run_paths import MARKER, RunPaths, discarded, step_in

STEP_FILE = "ctpo_export.json"
"""In an exported model: the RL step of its weights."""


@dataclass(frozen=True, slots=True)
class Export:
    """A model of a run in Hugging Face format. step: -1: not known, as an earlier version wrote it."""

    path: Path
    step: int


def record_step(model: Path, step: int) -> None:
    """Write the RL step of a model into its directory."""
    (model / STEP_FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")


def exports(run: Path, directory: str) -> list[Export]:
    """Return all exports of a run, the one of its end first. directory: `export.directory`."""
    models = [run / directory, *sorted(RunPaths(run).checkpoint_exports())]
    return [Export(model, _step(model)) for model in models if (model / "config.json").is_file()]


def discard_exports(run: Path, directory: str, after: int) -> list[Path]:
    """Rename the exports of steps beyond `after` to `discarded_*`, where no search finds them; the new paths.

    An earlier discarded export of the same name is deleted.
    """
    renamed = []
    for export in exports(run, directory):
        if export.step > after:
            target = discarded(export.path)
            if target.exists():
                shutil.rmtree(target)
            renamed.append(export.path.rename(target))
    return renamed


def checkpoint_steps(run: Path) -> list[int]:
    """Return the RL steps of which a run has a complete checkpoint, in order."""
    steps = (step_in(marker.parent.name) for marker in RunPaths(run).checkpoints.glob(f"*/{MARKER}"))
    return sorted(step for step in steps if step is not None)


def _step(model: Path) -> int:
    """As recorded, else as `ctpo export` names a directory."""
    named = step_in(model.name.removeprefix("model-"))
    without = -1 if named is None else named
    return read_note(model / STEP_FILE, lambda record: int(record["step"]), without, "its step is taken from its name")
