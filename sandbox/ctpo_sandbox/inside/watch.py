"""Watches a worker's child for exit, timeout, limit violation or cancellation."""

import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable

from ctpo_sandbox.records import MAX_MESSAGE_BYTES, WALL_FACTOR
from ctpo_sandbox.timeouts import EXCESS_POLL_MAX_S, EXCESS_POLL_S, WATCH_SHORTEST_WAIT_S

TIME = "time"
STOPPED = "its caller no longer waits"
UNCHECKED = "because its limits could not be checked"
_REST = 4
_PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED of a process, the low bits of its clock id


class Watch:
    """Watches one child after another of a worker.

    excess: the limit that a child exceeds, for limits that the kernel does not enforce; "" for none. Called repeatedly,
    the less often the longer a call takes, within bounds.
    """

    def __init__(self, control: socket.socket, excess: Callable[[int], str]) -> None:
        self._control, self._excess = control, excess
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def wait(self, child: int, limit_s: float) -> str:
        """Wait for the exit of `child`, which may use `limit_s` seconds of CPU time, and twice as many of wall time.

        Returns the reason for which it was killed, "" when it exited by itself. Raises EOFError when the server has
        closed its end of the control socket. The child is dead or dying afterwards.
        """
        pidfd = os.pidfd_open(child)
        self._poll.register(pidfd, select.POLLIN)
        reason = STOPPED
        try:
            reason = self._wait(pidfd, child, limit_s)
            return reason
        finally:
            if reason:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._poll.unregister(pidfd)
            os.close(pidfd)

    def _wait(self, pidfd: int, child: int, limit_s: float) -> str:
        now = time.monotonic()
        end, next_look, left_s = now + WALL_FACTOR * limit_s, now + EXCESS_POLL_S, limit_s
        while left_s > 0:
            for descriptor, _ in self._poll.poll(1000 * max(WATCH_SHORTEST_WAIT_S, min(left_s, next_look - now))):
                return "" if descriptor == pidfd else self._stopped()
            now = time.monotonic()
            if now >= next_look:
                if reason := checked(lambda: self._excess(child)):
                    return reason
                took_s = time.monotonic() - now
                next_look = now + took_s + max(EXCESS_POLL_S, min(_REST * took_s, EXCESS_POLL_MAX_S))
            left_s = min(limit_s - _cpu_s(child), end - now)
        return TIME

    def _stopped(self) -> str:
        """The server has sent a message, which can only be STOP, or has closed its end."""
        if not self._control.recv(MAX_MESSAGE_BYTES):
            raise EOFError("the server is gone")
        return STOPPED


def checked(excess: Callable[[], str]) -> str:
    """`excess()`. The run changes what is measured, so a failure to measure ends the run, not the worker."""
    try:
        return excess()
    except Exception:
        traceback.print_exc()
        return UNCHECKED


def _cpu_s(child: int) -> float:
    """CPU seconds of the child; 0.0 when it has just exited."""
    try:
        return time.clock_gettime(~child << 3 | _PROCESS_CPU_CLOCK)
    except OSError:
        return 0.0
