"""Processes of a run that are stopped, as by SIGSTOP: what waits for one cannot tell it from one that is busy."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import psutil

log = logging.getLogger(__name__)

_STARTS_MORE = ("raylet", "ray::Rollout")
"""Names of processes below which others of the run are; users' programs and functions are below the rest."""


class StoppedProcesses:
    """Names the processes that this one has started, and which are stopped at two checks in a row."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._named: set[int] = set()

    def check(self) -> None:
        """Log what is stopped now and was at the last check, once; and what runs again."""
        found = {each.pid: name for each, name in _stopped(psutil.Process())}
        for pid in found.keys() & self._seen - self._named:
            log.warning(
                "%s (process %d) is stopped; what waits for it continues after kill -CONT %d", found[pid], pid, pid
            )
        for pid in self._named - found.keys():
            log.warning("process %d is not stopped any more", pid)
        self._named = found.keys() & (self._named | self._seen)
        self._seen = set(found)


def _stopped(parent: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    try:
        children = parent.children()
    except psutil.NoSuchProcess:  # it has ended, and another process has its number
        return
    for child in children:
        try:
            name, status = child.name(), child.status()
        except psutil.NoSuchProcess:
            continue
        if status == psutil.STATUS_STOPPED:
            yield child, name
        if name.startswith(_STARTS_MORE):
            yield from _stopped(child)
