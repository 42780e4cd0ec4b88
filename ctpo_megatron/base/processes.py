"""Whether processes still run, and their end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_POLL_S = 0.01


def runs(process: psutil.Process) -> bool:
    """Return whether it has not ended; a zombie has, even if no process reaps it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_all(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Kill processes, children or not, and wait until they have ended, `timeout_s` at most; returns what still runs.

    A killed process runs on until the kernel has freed its memory.
    """
    killed = [*processes]
    for process in killed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return wait_for(killed, timeout_s)


def wait_for(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until processes have ended, children or not, `timeout_s` at most; returns what still runs.

    Not `psutil.wait_procs`: it waits for zombies, too, which no process reaps in some containers. And it fails where
    one that is no child is being reaped (psutil issue 2715).
    """
    left, deadline = [*processes], time.monotonic() + timeout_s
    while (left := [each for each in left if runs(each)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left
