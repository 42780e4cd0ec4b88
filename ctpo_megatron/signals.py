"""Keeps SIGTERM, which schedulers send to all processes of a job, from processes that the trainer still needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def children_spared_sigterm() -> Iterator[None]:
    """Processes started within, and theirs, never act on SIGTERM (SIGKILL ends them); the caller gets it afterwards."""
    # multiprocessing starts it before any other child, and unblocks the signal then.
    resource_tracker.ensure_running()
    # A blocked signal is inherited through fork and exec, as an ignored one is, but is not lost to the caller.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
