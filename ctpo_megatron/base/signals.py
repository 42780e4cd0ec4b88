"""The signals that ask a run to end; keeps them, which go to all processes of a job, from those that it still needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Schedulers send the first two, a keyboard the third, a terminal or an SSH connection that is closed the last."""


def heeded() -> tuple[signal.Signals, ...]:
    """The signals of `ENDING` that this process acts on: under `nohup` it survives its terminal."""
    spared = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ENDING if not (spared and number == signal.SIGHUP))


@contextmanager
def children_spared() -> Iterator[None]:
    """Processes started within, and theirs, never act on `ENDING` (SIGKILL ends them); the caller does, afterwards."""
    # multiprocessing starts it before any other child, and unblocks the signals then.
    resource_tracker.ensure_running()
    # A blocked signal is inherited through fork and exec, as an ignored one is, but is not lost to the caller.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
