"""The stop signal: set by a scheduler, the keyboard or the clock; what waits checks it, and the run saves its state.

The times of the job's scheduler and launcher, too: its end, and the wait after SIGTERM. And who is kept from signals
that go to all processes of a job: those that a run still needs to save its state.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import FrameType
from typing import Protocol

log = logging.getLogger(__name__)

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
"""Schedulers send the first two, a keyboard the third, a terminal or an SSH connection that is closed the last."""

_STDERR = 2
_LARGEST_SIGACTION = 1024
"""Bytes for C's struct sigaction, of 152 with glibc on x86-64."""

STOP_POLL_S = 0.5  # how often a waiting thread checks the stop signal


class Stop(Protocol):
    """Whether to stop: `StopSignal`."""

    def is_set(self) -> bool:
        """Return whether this process is to stop; local. May raise what ends the run, such as a lost rank."""


class StopRequest(Stop, Protocol):
    """A stop that can be requested, too."""

    def ask(self, cause: str) -> None:
        """This process is to stop for a cause that another start mends; from any thread."""


class NeverStop:
    """For callers that never stop early."""

    def is_set(self) -> bool:
        """Return False."""
        return False

    def ask(self, cause: str) -> None:
        """Do nothing: the caller raises what has happened."""


class Cancelled(Exception):
    """A wait ended early because the stop signal is set."""


EXIT_STATUS = 128 + signal.SIGTERM
TRY_AGAIN = 75
"""Exit status of a run that a fault has ended which another start may not meet (EX_TEMPFAIL)."""
BEGUN = "the run had begun: after step"
"""How the note begins of an exception that has ended a run which has trained."""
_ONE_PRESS_S = 1.0  # a launcher may pass on the Ctrl-C that the terminal has sent to this process, too
# Ignore repeated signals for this long while shutting down; after that, assume the SystemExit was swallowed and raise
# it again.
_CLOSING_S = 60.0
_TORCHRUN_GRACE_S = 30.0  # torchrun's default, from the signal that ends its ranks to SIGKILL


class StopSignal:
    """Whether this process is to stop. Outside of `deferred` it stops at once, by SystemExit, so that engines and
    sandbox are closed.

    Set by SIGTERM, SIGUSR1, Ctrl-C (SIGINT), a terminal that is closed (SIGHUP), and by a fault (`ask`). The clock sets
    it when `grace_s` seconds are left of a job that ends at `job_end` (seconds since the epoch). Within `deferred` the
    state may be saved first, for at most `grace_s` seconds; a second Ctrl-C ends that. status: exit status of a process
    that was stopped.
    """

    def __init__(self, grace_s: float, job_end: float | None = None) -> None:
        self.status = EXIT_STATUS
        self._grace_s = grace_s
        self._deferring = False
        self._set_by, self._set_at = "", 0.0
        self._left_at: float | None = None
        self._process = os.getpid()
        for number in heeded():
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        if job_end is not None:
            _alarm_in(job_end - grace_s - time.time())

    def is_set(self) -> bool:
        """Return whether this process is to stop; local."""
        return bool(self._set_by)

    def agreed(self, gather: Callable[[int], list[int]]) -> bool:
        """Return whether any rank is to stop; then it is set on all of them. Collective, as `gather` is."""
        if any(gather(self.is_set())):
            rank_zeros = gather(self.status)[0]  # which alone may be asked to stop for a fault
            if not self.is_set():
                self._set_by, self._set_at, self.status = "another rank", time.monotonic(), rank_zeros
                _alarm_in(self._grace_s)
        return self.is_set()

    def ask(self, cause: str) -> None:
        """Stop for a cause that another start mends; from any thread.

        Outside of `deferred` nothing follows until it begins: what runs there may not need it.
        """
        if self._set_by:
            return
        self._set_by, self._set_at, self.status = cause, time.monotonic(), TRY_AGAIN
        if self._deferring:
            self._announce()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the caller check `is_set` and `agreed`, and save before it ends."""
        self._deferring = True
        if self._set_by:  # `ask` came before
            self._announce()
        try:
            yield
        finally:
            self._deferring = False

    def leave(self) -> int:
        """Note that the state is saved, and end the deadline; returns the exit status."""
        self._begin_to_leave()
        return self.status

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._deferring and os.getpid() != self._process:
            return  # a process forked to write a checkpoint, whose work is wanted
        keyboard = number == signal.SIGINT
        self._set("Ctrl-C" if keyboard else signal.Signals(number).name, 128 + number if keyboard else EXIT_STATUS)
        if keyboard and time.monotonic() - self._set_at > _ONE_PRESS_S:
            self._exit("Ctrl-C again: stopping now, without a checkpoint", 128 + number)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if not (self._set_by and self._deferring):
            return self._set("the job's end", EXIT_STATUS)
        late = f"not done within {self._grace_s:g} s of {self._set_by} (checkpoint.grace_s)"
        self._exit(f"{late}; leaving without a checkpoint", self.status)

    def _set(self, by: str, status: int) -> None:
        if not self._deferring:
            return self._exit(f"{by}: stopping now; no training step is running", status)
        if self._set_by:
            return
        self._set_by, self._set_at, self.status = by, time.monotonic(), status
        self._announce()

    def _announce(self) -> None:
        _alarm_in(self._grace_s)
        say_in_handler(f"{self._set_by}: a checkpoint follows, within {self._grace_s:g} s (checkpoint.grace_s)")

    def _exit(self, line: str, status: int) -> None:
        """Raise SystemExit, unless one is on its way: engines and sandbox are being closed then."""
        if self._left_at is not None and time.monotonic() < self._left_at + _CLOSING_S:
            return
        self._begin_to_leave()
        say_in_handler(line)
        sys.exit(status)

    def _begin_to_leave(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._left_at = time.monotonic()


def stop_signal(deadline: float | None, grace_s: float) -> StopSignal:
    """For `run.deadline` and `checkpoint.grace_s`, as the job's scheduler and launcher allow."""
    warn_of_short_grace(grace_s)
    return StopSignal(grace_s, job_end(deadline))


def job_end(deadline: float | None) -> float | None:
    """When this job ends, in seconds since the epoch: `run.deadline`, else Slurm's SLURM_JOB_END_TIME; None: never.

    A time of Slurm's in the past is not this job's: a shell or a `scontrol update` may have left it behind.
    """
    if deadline is not None:
        return deadline
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    if not text:
        return None
    if not text.isdecimal() or float(text) <= time.time():
        log.warning("SLURM_JOB_END_TIME=%s is no time to come and is ignored: give run.deadline", text)
        return None
    return float(text)


def warn_of_short_grace(grace_s: float) -> None:
    """Warn when `checkpoint.grace_s` is longer than torchrun waits before it kills its ranks; on rank zero."""
    if os.environ.get("RANK", "0") != "0" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    limit_s = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_GRACE_S))
    if grace_s >= limit_s:
        remedy = "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT with more (or give --shutdown-timeout, unless you did)"
        cause = "torchrun kills its ranks"
        log.warning("checkpoint.grace_s is %g s, but %s %g s after SIGTERM: %s", grace_s, cause, limit_s, remedy)


def _alarm_in(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would switch it off


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals of `ENDING` that this process acts on: under `nohup` it survives its terminal."""
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
