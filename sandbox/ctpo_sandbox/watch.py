"""What a worker waits for while its child runs: its end, its time, its excesses, or the end of interest in it."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ctpo_sandbox.records import MAX_MESSAGE_BYTES, WALL_FACTOR

TIME = "time"
STOPPED = "nobody waits for it any more"
_SHORTEST_WAIT_S = 0.01
_LOOK_S = 0.02
_REST = 4
_THREADS_FIELD = 17  # of /proc/<pid>/stat, counted from the state
_PROCESS_CPU_CLOCK = 2  # CPUCLOCK_SCHED of a process, the low bits of its clock's number


class ServerGone(Exception):
    """The server closed its end of the control socket."""


class Watch:
    """Over the process `child`, which may use `limit_s` seconds of CPU time, and twice as many of wall time.

    excess: what it has more of than it may have, where the kernel does not see to that; "" for nothing. Asked time and
    again, the less often the longer the answer takes.
    """

    def __init__(self, child: int, control: socket.socket, limit_s: float, excess: Callable[[], str]) -> None:
        self._child, self._control, self._limit_s, self._excess = child, control, limit_s, excess
        now = time.monotonic()
        self._end, self._next_look = now + WALL_FACTOR * limit_s, now + _LOOK_S

    def wait(self) -> str:
        """Wait for the end of the child; what it had to be killed for, "" when it ended by itself.

        Raises ServerGone. The child is dead or dying afterwards.
        """
        pidfd = os.pidfd_open(self._child)
        try:
            return self._wait(pidfd)
        finally:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)

    def _wait(self, pidfd: int) -> str:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        while True:
            left_s = self._left_s()
            if left_s <= 0:
                return TIME
            until_look_s = self._next_look - time.monotonic()
            ready = dict(poll.poll(1000 * max(_SHORTEST_WAIT_S, min(left_s, until_look_s))))
            if pidfd in ready:
                return ""
            if ready:
                if not self._control.recv(MAX_MESSAGE_BYTES):
                    raise ServerGone
                return STOPPED
            if time.monotonic() >= self._next_look and (reason := self._look()):
                return reason

    def _look(self) -> str:
        began = time.monotonic()
        reason = self._excess()
        ended = time.monotonic()
        self._next_look = ended + max(_LOOK_S, _REST * (ended - began))
        return reason

    def _left_s(self) -> float:
        """Seconds that the child may still use, at least: it may be off the CPU for some of them."""
        try:
            used_s = time.clock_gettime(~self._child << 3 | _PROCESS_CPU_CLOCK)
        except OSError:  # it has just ended
            used_s = 0.0
        return min(self._limit_s - used_s, self._end - time.monotonic())


def excess_threads(process: int, most: int) -> str:
    """ "" unless it has more than `most` threads. Where it has a user of its own the kernel counts them."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return ""
    return f"for more than {most} threads" if int(fields[_THREADS_FIELD]) > most else ""
