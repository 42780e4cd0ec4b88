"""Checks of a tracker before a run starts."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.tracking.trackers.protocol import find

if TYPE_CHECKING:
    from ctpo_megatron.config.extension import Extension

_PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "prometheus": "prometheus_client"}
"""Packages of our own trackers that a training environment may lack."""


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
    if python is None and package and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed: see docs/extend.md for it and for tracking.python"
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
