"""The stop signal as everything that waits sees it; `run.stop_signal` has the one of a run."""

from __future__ import annotations

import time
from typing import Protocol

STOP_POLL_S = 0.5  # how often a waiting thread checks the stop signal


class Stop(Protocol):
    """Whether to stop: `StopSignal`."""

    def is_set(self) -> bool:
        """Whether this process is to stop; local. May raise what ends the run, such as a lost rank."""


class NeverStop:
    """For callers that are not asked to stop."""

    def is_set(self) -> bool:
        """See `Stop`."""
        return False


class Cancelled(Exception):
    """A wait ended early because the stop signal is set."""


def stop_poll(deadline: float, stop: Stop, what: str) -> float:
    """Seconds to wait before the stop signal is checked again; 0 once `deadline` (monotonic) has passed.

    Raises Cancelled, which names `what` is waited for, when the stop signal is set.
    """
    if stop.is_set():
        raise Cancelled(f"stop requested while waiting for {what}")
    return min(STOP_POLL_S, max(0.0, deadline - time.monotonic()))
