"""Which files of ours a row and a weight enter in one step of the small quickstart: `tests.structure --trace`.

A row: from `Rollouts.next_batch` to the end of `Trainer.train`, which also computes the figures of a step, and all of
`RolloutEngine.run_group`. A weight: from `Rollouts.publish` until the pool has the reports of its engines, and all of
the three steps of an update in `RolloutEngine`. Trainer, engine and reward workers are recorded. The server of the
sandbox is not, nor are threads that serve neither walk, such as the heartbeat's.

A file is entered when one of its functions is called, those that a dataclass generates included. Imports, the
configuration and whatever else precedes the first step do not count. `hook/sitecustomize.py` records it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tests.walk.hook.sitecustomize import DOOR, DOORS, FLAGS, FOLDER, PACKAGES, ROW, WEIGHTS

HOOK = Path(__file__).parent / "hook"
# With less SFT no row calls the tool. An evaluation would sample as well, and export and report belong to no step.
ONE_STEP = (
    "run.steps=1",
    "sft.steps=200",
    "data.eval=[]",
    "eval.every=0",
    "export.enabled=false",
    "tracking.report=false",
)
Walks = dict[str, dict[str, list[str]]]
"""Row or weights -> file, relative to the root -> functions that were called, sorted."""


def trace(folder: Path, packages: Iterable[Path]) -> None:
    """Run one step in a folder and record in it what processes enter. Raises RuntimeError when the run fails."""
    from tests.end_to_end.small_run import Ctpo  # its import writes the task
    from tests.support import children

    ctpo = Ctpo(folder)
    (folder / FLAGS).write_bytes(bytes(2))
    environment = ctpo.environment
    environment["PYTHONPATH"] = os.pathsep.join([str(HOOK), environment["PYTHONPATH"]])
    environment |= {FOLDER: str(folder), PACKAGES: os.pathsep.join(f"{path}{os.sep}" for path in packages)}
    run = children.run(ctpo.command(*ONE_STEP), directory=folder, environment=environment, deadline_s=280)
    if run.returncode != 0:
        raise RuntimeError(f"the run ended with status {run.returncode}:\n{(run.stdout + run.stderr)[-4000:]}")


def merged(folder: Path, root: Path) -> Walks:
    """What all processes entered. Raises ValueError when a door was not passed: a walk would lack what follows it."""
    records = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    if closed := set(DOORS) - {name for kind, _, name in records if kind == DOOR}:
        raise ValueError(
            f"no process called {', '.join(sorted(closed))}: name the methods where walks begin now, in DOORS of "
            f"{(HOOK / 'sitecustomize.py').relative_to(root)}"
        )
    walks: dict[str, dict[str, set[str]]] = {ROW: {}, WEIGHTS: {}}
    for kind, file, function in records:
        if kind != DOOR:
            walks[kind].setdefault(str(Path(file).relative_to(root)), set()).add(function)
    return {name: {file: sorted(found) for file, found in sorted(files.items())} for name, files in walks.items()}
