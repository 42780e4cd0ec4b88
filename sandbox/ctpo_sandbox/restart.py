"""Restarts a server at its address whenever it exits: the loop behind `SandboxServer` and `--supervise`."""

import logging
import subprocess
import time
from collections.abc import Callable, Sequence

from ctpo_sandbox.errors import SandboxStartError
from ctpo_sandbox.timeouts import START_POLL_S

_log = logging.getLogger("ctpo_sandbox.restart")


class Restarter:
    """Waits for a server process to exit, and restarts it on `port` until `stopping` is true.

    start: restarts the server on the same port, or raises SandboxStartError if it is not healthy. pauses_s: pauses
    before a restart, by consecutive early exits and failed starts. The last one repeats. steady_s: a server that ran
    this long did not exit early. restarts: number of restarts.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        port: int,
        *,
        stopping: Callable[[], bool],
        pauses_s: Sequence[float],
        steady_s: float = 0.0,
    ) -> None:
        self.restarts = 0
        self._start, self._port, self._stopping = start, port, stopping
        self._pauses_s, self._steady_s = pauses_s, steady_s
        self._early_exits = 0

    def run(self, process: subprocess.Popen[bytes], is_final: Callable[[int], bool] = lambda _: False) -> int | None:
        """Keep the server running, starting with `process`.

        Returns the exit status of the last process when it is final or `stopping` is true, and None when `stopping`
        becomes true between two processes.
        """
        while True:
            started = time.monotonic()
            status = process.wait()
            if self._stopping() or is_final(status):
                return status
            self._early_exits = 0 if time.monotonic() - started >= self._steady_s else self._early_exits + 1
            restarted = self._restart(status)
            if restarted is None:
                return None
            process = restarted

    def _restart(self, status: int) -> subprocess.Popen[bytes] | None:
        """The new process; None when `stopping` becomes true before one is healthy."""
        while True:
            self.restarts += 1
            pause_s = self._pauses_s[min(self._early_exits, len(self._pauses_s) - 1)]
            _log.error(
                "the sandbox server ended with status %d; starting it again on port %d in %g s",
                status, self._port, pause_s,
            )  # fmt: skip
            self._wait(pause_s)
            if self._stopping():
                return None
            try:
                return self._start()
            except SandboxStartError as error:
                _log.error("%s", error)
                self._early_exits += 1

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping() and time.monotonic() < deadline:
            time.sleep(START_POLL_S)
