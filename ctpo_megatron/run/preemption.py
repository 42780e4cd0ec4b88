"""A run is asked to end, by a scheduler, the keyboard or the clock: checkpoint what is done, leave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

from ctpo_megatron.base.signals import heeded
from ctpo_megatron.config import Config
from ctpo_megatron.policy import gather_objects
from ctpo_megatron.run.scheduler import job_end, warn_of_short_grace

EXIT_STATUS = 128 + signal.SIGTERM
_STDERR = 2
_ONE_PRESS_S = 1.0
"""A launcher may pass on the Ctrl-C that the terminal has sent to this process, too."""
_CLOSING_S = 60.0
"""Who is asked again meanwhile goes on with closing what it has opened; later, somebody has swallowed the exception."""


class Preemption:
    """Ends the process at once when it is asked to end, as an exception, so that engines and sandbox are closed.

    Asking are SIGTERM, SIGUSR1, Ctrl-C (SIGINT), a terminal that is closed (SIGHUP), and the clock when `grace_s`
    seconds are left of a job that ends at `job_end` (seconds since the epoch). Inside `deferred` the state may be saved
    first, for at most `grace_s` seconds; a second Ctrl-C ends that. A process that leaves is not interrupted by being
    asked again. status: of a process that leaves because it was asked to.
    """

    def __init__(self, grace_s: float, job_end: float | None = None) -> None:
        self.status = EXIT_STATUS
        self._grace_s = grace_s
        self._deferring = False
        self._asked_by, self._asked_at = "", 0.0
        self._left_at: float | None = None
        self._process = os.getpid()
        for number in heeded():
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)
        if job_end is not None:
            _alarm_in(job_end - grace_s - time.time())

    @classmethod
    def of(cls, config: Config) -> Self:
        """As configured, and as the job's scheduler and launcher allow."""
        end = job_end(config)
        warn_of_short_grace(config.checkpoint.grace_s, end)
        return cls(config.checkpoint.grace_s, end)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the caller look at `asked` and `requested` instead."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def asked(self) -> bool:
        """Whether this process was asked to end."""
        return bool(self._asked_by)

    def requested(self) -> bool:
        """Whether any rank was asked to end; collective."""
        return any(gather_objects(self.asked()))

    def leave(self) -> int:
        """The state is saved and nothing is left to hurry for; returns the exit status."""
        self._begin_to_leave()
        return self.status

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._deferring and os.getpid() != self._process:
            return  # a process forked to write a checkpoint, whose work is wanted
        keyboard = number == signal.SIGINT
        self._ask("Ctrl-C" if keyboard else signal.Signals(number).name, 128 + number if keyboard else EXIT_STATUS)
        if keyboard and time.monotonic() - self._asked_at > _ONE_PRESS_S:
            self._exit("Ctrl-C again: leaving at once, without a checkpoint", 128 + number)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if not self._asked_by:
            return self._ask("the job's end", EXIT_STATUS)
        late = f"not done within {self._grace_s:g} s of {self._asked_by} (checkpoint.grace_s)"
        self._exit(f"{late}; leaving without a checkpoint", self.status)

    def _ask(self, by: str, status: int) -> None:
        if not self._deferring:
            return self._exit(f"{by}: leaving at once; no step is at hand", status)
        if self._asked_by:
            return
        self._asked_by, self._asked_at, self.status = by, time.monotonic(), status
        _alarm_in(self._grace_s)
        _say(f"{by}: a checkpoint follows, within {self._grace_s:g} s (checkpoint.grace_s)")

    def _exit(self, line: str, status: int) -> None:
        """Raise SystemExit, unless one is on its way: engines and sandbox are being closed then."""
        if self._left_at is not None and time.monotonic() < self._left_at + _CLOSING_S:
            return
        self._begin_to_leave()
        _say(line)
        sys.exit(status)

    def _begin_to_leave(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._left_at = time.monotonic()


def _alarm_in(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would switch it off


def _say(line: str) -> None:
    # Within a signal handler: a logger's stream may be in the middle of a write.
    with suppress(OSError):  # Ctrl-C has ended `tee`, too, or the terminal is closed
        os.write(_STDERR, f"{line}\n".encode())
