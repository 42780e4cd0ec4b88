"""The protocol of trackers: the names of the built-in ones, how one is created, and why one cannot be."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ctpo_megatron.base.extensions import ExtensionError, call_problem, load
from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.installed import install_command, is_installed
from ctpo_megatron.base.run_paths import RunPaths

if TYPE_CHECKING:
    from ctpo_megatron.config.extension import Extension

_PACKAGE = "ctpo_megatron.tracking.trackers"
BUILT_IN: Mapping[str, tuple[str, str, str]] = {
    "tensorboard": (f"{_PACKAGE}.tensorboard:TensorBoard", "", ""),
    "wandb": (f"{_PACKAGE}.wandb:WeightsAndBiases", "wandb", "wandb"),
    "mlflow": (f"{_PACKAGE}.mlflow:Mlflow", "mlflow", "mlflow"),
    "prometheus": (f"{_PACKAGE}.prometheus:Prometheus", "prometheus_client", "sandbox"),
}
"""Name in a configuration -> import path of the class, a module that a training environment may lack, its extra."""


class Tracker(Protocol):
    """Sends the metrics of a run elsewhere. If it raises, the failure is counted and the run continues.

    It is created as `Name(run_dir, config, identity, **arguments)`: the run directory, the resolved configuration as
    plain mappings, and the earlier `identity` of this tracker in this run directory (None: it is new). A thread of the
    trainer's process creates it and makes all calls, in order.

    It may have an attribute `identity`, a text that identifies the run at the tracker's service; it is stored in the
    run directory. It may have a method `rewind(step)`, called when a resumed run will log the steps after `step` again.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step, which increases by one or stays; values may be NaN or infinite. Metrics of the
        supervised stage begin with `sft/` and have their own step count, from 1."""

    def close(self) -> None:
        """Send the rest; the last call, also for a tracker that was switched off."""


def make(extension: Extension, run_dir: Path, config: Mapping[str, Any]) -> Tracker:
    """Create a tracker with its earlier identity from the run directory, and store its identity there."""
    path = RunPaths(run_dir).tracker(extension.name)
    known = read_note(path, operator.itemgetter("identity"), None, f"{extension} begins a run of its own")
    tracker: Tracker = _class_of(extension)(run_dir, config, known, **extension.arguments)
    identity = getattr(tracker, "identity", None)
    if identity is not None and identity != known:
        path.parent.mkdir(exist_ok=True)
        write_json(path, {"tracker": extension.name, "identity": identity}, durable=True)
    return tracker


def tracker_problem(extension: Extension) -> str | None:
    """Return why this tracker cannot be created, or None. `extensions.activate` comes first."""
    try:
        create = _class_of(extension)
    except ExtensionError as error:
        return str(error)
    _, package, extra = BUILT_IN.get(extension.name, ("", "", ""))
    if package and not is_installed(package):
        return f"the package {package} is not installed: {install_command(extra)}"
    if not callable(create):
        return f"{extension} is no class or function"
    if problem := call_problem(create, ("run_dir", "config", "identity"), extension.arguments):
        return f"{extension} {problem}"
    missing = [name for name in ("log", "close") if inspect.isclass(create) and not hasattr(create, name)]
    return f"{extension} has no method {' or '.join(missing)}" if missing else None


def _class_of(extension: Extension) -> Any:
    """The class (or function) that creates the tracker; `extensions.activate` comes first. Raises ExtensionError."""
    name = extension.name
    if not extension.is_path and name not in BUILT_IN:
        hint = "; metrics.jsonl is always written" if name == "jsonl" else ""
        raise ExtensionError(f"{name!r} is no tracker: write {', '.join(BUILT_IN)}, or package.module:Name{hint}")
    return load(name if extension.is_path else BUILT_IN[name][0])
