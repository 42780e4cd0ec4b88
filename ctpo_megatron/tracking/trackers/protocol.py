"""The protocol of trackers, and the names of the built-in ones."""

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
"""Name in a configuration -> import path of the class."""


class Tracker(Protocol):
    """Sends the metrics of a run elsewhere. If it raises, the failure is counted and the run continues.

    It is created as `Name(run_dir, config, identity, **arguments)`: the run directory, the resolved configuration as
    plain mappings, and the earlier `identity` of this tracker in this run directory (None: it is new).

    It may have an attribute `identity`, a text that identifies the run at the tracker's service; it is stored in the
    run directory. It may have a method `rewind(step)`, called when a resumed run will log the steps after `step` again.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, which increases by one or stays; values may be NaN or infinite. Metrics of the
        supervised stage begin with `sft/` and have their own step count, from 1."""

    def close(self) -> None:
        """Send the rest; the last call."""


def find(name: str) -> Any:
    """The class (or function) that creates the tracker of that name; `extensions.activate` comes first."""
    if ":" in name:
        return load(name)
    if name not in BUILT_IN:
        hint = "; metrics.jsonl is always written" if name == "jsonl" else ""
        raise ExtensionError(f"{name!r} is no tracker: write {', '.join(BUILT_IN)}, or package.module:Name{hint}")
    return load(BUILT_IN[name])


def make(name: str, arguments: Mapping[str, Any], run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Create a tracker with its earlier identity from the run directory, and store its identity there."""
    path = RunPaths(run_dir).tracker(name)
    known = read_note(path, operator.itemgetter("identity"), None, f"{name} begins a run of its own")
    tracker: Tracker = find(name)(run_dir, config, known, **arguments)
    identity = getattr(tracker, "identity", None)
    if identity is not None and identity != known:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"tracker": name, "identity": identity}, durable=True)
    return tracker
