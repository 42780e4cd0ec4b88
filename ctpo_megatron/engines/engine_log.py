"""The log of an engine on its own node. Without Ray, which an engine does not need."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from pathlib import Path

from ctpo_megatron.engines.tasks import EngineSpec

_MARK = ".engines"


def redirect_output(path: Path) -> None:
    """Send this process's and its children's stdout and stderr to `path`. Raises OSError that names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def mark(directory: Path) -> str:
    """Write a marker file into `directory` and return its content: a node that reads the same shares the directory."""
    name = uuid.uuid4().hex
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARK).write_text(name, encoding="utf-8")
    return name


def unmark(directory: Path) -> None:
    """Remove the marker file."""
    (directory / _MARK).unlink(missing_ok=True)


def path_here(spec: EngineSpec, index: int) -> Path:
    """Where engine `index` writes on this node: the run directory, if this node sees it."""
    path = spec.log_path(index)
    if not spec.log_mark:
        return path
    try:
        seen = (spec.log_dir / _MARK).read_text(encoding="utf-8") == spec.log_mark
    except OSError:
        seen = False
    return (
        path if seen else Path(tempfile.gettempdir()) / f"ctpo-logs-{spec.log_mark}" / f"{path.stem}.{os.getpid()}.log"
    )
