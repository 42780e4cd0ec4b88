"""Ends what is left of the private Rays of killed runs: agents try for a minute to reach their GCS, which is gone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

PARENT, PREFIX = Path("/tmp"), "ctpo-ray-"
"""Of the folder of a private Ray, which each of its processes writes a log to."""

log = logging.getLogger(__name__)


def end_orphans() -> list[int]:
    """Kill this user's orphans of private Rays whose folder is gone (`temporary.sweep`); returns their process ids."""
    ended = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            folders = set(_folders(process.pid)) if _is_orphan(process) else set()
            if folders and not any((PARENT / folder).exists() for folder in folders):
                process.kill()
                ended.append(process.pid)
    if ended:
        log.info("ended what the Ray of a killed run had left: processes %s", ", ".join(map(str, ended)))
    return ended


def _is_orphan(process: psutil.Process) -> bool:
    """Whether it is this user's and was the child of a raylet. Raises psutil.Error."""
    if not process.name().startswith("ray::") or process.uids().effective != os.geteuid():
        return False
    parent = process.parent()
    return parent is None or parent.name() != "raylet"


def _folders(pid: int) -> Iterator[str]:
    """Names of the folders of private Rays in which a process has files open, removed ones too."""
    with suppress(OSError):  # it ends, or is another user's
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                *above, folder = Path(os.readlink(link)).parts[:3]
                if Path(*above) == PARENT and folder.startswith(PREFIX):
                    yield folder
