"""What a tracker is, and the names of ours."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ctpo_megatron.base.extensions import ExtensionError, load
from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.run_paths import RunPaths

TENSORBOARD = "tensorboard"
_PACKAGE = "ctpo_megatron.tracking.trackers"
BUILT_IN: Mapping[str, str] = {
    TENSORBOARD: f"{_PACKAGE}.tensorboard:TensorBoard",
    "wandb": f"{_PACKAGE}.wandb:WeightsAndBiases",
    "mlflow": f"{_PACKAGE}.mlflow:Mlflow",
    "prometheus": f"{_PACKAGE}.prometheus:Prometheus",
}
"""Word of a configuration -> import path of the class."""


class Tracker(Protocol):
    """Sends the metrics of a run elsewhere. It may raise: that is counted, and the run goes on.

    It is made as `Name(run_dir, config, identity, **arguments)`: the run directory, the resolved configuration as plain
    mappings, and the `identity` that a tracker of this name had in this run directory before (None: it is new).

    It may also have an attribute `identity` (text that finds the run again where the tracker keeps it; it is noted in
    the run directory), and a method `rewind(step)` (a resumed run is going to log the steps after `step` again).
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of a step, which grows by one or stays; values may be NaN or infinite. The steps of the
        supervised stage, whose names begin with `sft/`, are counted from 1 of their own."""

    def close(self) -> None:
        """Send what is left; nothing follows."""


def find(name: str) -> Any:
    """The class (or function) that makes the tracker of that name; `extensions.activate` comes first."""
    if ":" in name:
        return load(name)
    if name not in BUILT_IN:
        hint = "; metrics.jsonl is always written" if name == "jsonl" else ""
        raise ExtensionError(f"{name!r} is no tracker: write {', '.join(BUILT_IN)}, or package.module:Name{hint}")
    return load(BUILT_IN[name])


def make(name: str, arguments: Mapping[str, Any], run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Make a tracker that goes on where the run directory says it was, and note its identity there."""
    path = RunPaths(run_dir).tracker(name)
    known = read_note(path, operator.itemgetter("identity"), None, f"{name} begins a run of its own")
    tracker: Tracker = find(name)(run_dir, config, known, **arguments)
    identity = getattr(tracker, "identity", None)
    if identity is not None and identity != known:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"tracker": name, "identity": identity}, durable=True)
    return tracker
