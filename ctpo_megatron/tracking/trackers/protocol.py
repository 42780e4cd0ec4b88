"""The protocol of trackers: the names of the built-in ones, how one is created, and why one cannot be."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ctpo_megatron.base.extensions import ExtensionError, load
from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.installed import is_installed
from ctpo_megatron.base.run_paths import RunPaths

if TYPE_CHECKING:
    from ctpo_megatron.config.extension import Extension

TENSORBOARD = "tensorboard"
_PACKAGE = "ctpo_megatron.tracking.trackers"
BUILT_IN: Mapping[str, str] = {
    TENSORBOARD: f"{_PACKAGE}.tensorboard:TensorBoard",
    "wandb": f"{_PACKAGE}.wandb:WeightsAndBiases",
    "mlflow": f"{_PACKAGE}.mlflow:Mlflow",
    "prometheus": f"{_PACKAGE}.prometheus:Prometheus",
}
"""Name in a configuration -> import path of the class."""

PROMETHEUS = "prometheus"
OF_THIS_ENVIRONMENT = (TENSORBOARD, PROMETHEUS)
"""Trackers that `tracking.python` does not run: they need what the trainer and the sandbox have."""

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", PROMETHEUS: "prometheus_client"}
"""Packages of our own trackers that a training environment may lack."""


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


def tracker_problem(extension: Extension, python: str | None = None) -> str | None:
    """Why this tracker cannot be created, or None. `extensions.activate` comes first.

    python: `tracking.python`. If set, only its packages count, and a user's tracker is not imported here.
    """
    if python is not None and not Path(python).is_file():
        return f"tracking.python: {python} is not there"
    if python is not None and extension.is_path:
        return None
    try:
        make = find(extension.name)
    except ExtensionError as error:
        return str(error)
    package = _PACKAGES.get(extension.name)
    is_here = python is None or extension.name in OF_THIS_ENVIRONMENT
    if is_here and package and not is_installed(package):
        return f"the package {package} is not installed: see docs/howto/tracker.md for it and for tracking.python"
    return _does_not_bind(make, extension) or _lacks(make, extension)


def _does_not_bind(make: object, extension: Extension) -> str | None:
    if not callable(make):
        return f"{extension} is no class or function"
    try:
        inspect.signature(make).bind(Path(), {}, None, **extension.arguments)
    except TypeError as error:
        return f"{extension} is made as {extension}(run_dir, config, identity, **arguments): {error}"
    return None


def _lacks(make: object, extension: Extension) -> str | None:
    missing = [name for name in ("log", "close") if inspect.isclass(make) and not hasattr(make, name)]
    return f"{extension} has no method {' or '.join(missing)}" if missing else None
