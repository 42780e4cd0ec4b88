"""The signals that ask a run to end; keeps them, which go to all processes of a job, from those that it still needs."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Schedulers send the first two, a keyboard the third, a terminal or an SSH connection that is closed the last."""

_STDERR = 2
_LARGEST_SIGACTION = 1024
"""Bytes for C's struct sigaction, of 152 with glibc on x86-64."""


def heeded() -> tuple[signal.Signals, ...]:
    """The signals of `ENDING` that this process acts on: under `nohup` it survives its terminal."""
    spared = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in ENDING if not (spared and number == signal.SIGHUP))


def say_in_handler(line: str) -> None:
    """Write a line to stderr from a signal handler: a stream of Python may be in the middle of a write."""
    with suppress(OSError):  # Ctrl-C has ended `tee`, too, or the terminal is closed
        os.write(_STDERR, f"{line}\n".encode())


@contextmanager
def action_kept(number: signal.Signals) -> Iterator[None]:
    """Afterwards this process acts on the signal as before, whatever libraries have installed within, in C too.

    In any thread, where Python's own function is for the main thread. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(_LARGEST_SIGACTION)
    _checked(libc.sigaction(number, None, before))
    try:
        yield
    finally:
        _checked(libc.sigaction(number, before, None))


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "sigaction")


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


def end_with(process: int) -> None:
    """Have this process killed when another one ends, which need not be its parent, and may have ended already."""

    def wait() -> None:
        try:
            ended = select.poll()  # `select` takes no descriptor beyond 1023
            ended.register(os.pidfd_open(process), select.POLLIN)
            ended.poll()
        except OSError as error:
            if error.errno not in (errno.ESRCH, errno.EINVAL):  # EINVAL: it is being reaped
                raise
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with", daemon=True).start()
