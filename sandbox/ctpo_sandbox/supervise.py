"""Restarts a server at its address whenever it exits: for `SandboxServer`, and for `ctpo sandbox serve --supervise`."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ctpo_sandbox.errors import SandboxStartError
from ctpo_sandbox.timeouts import START_POLL_S, SUPERVISE_PAUSES_S, SUPERVISE_STEADY_S

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_NOT_A_CRASH = (0, 1)
"""Exit status of a server that was stopped, or could not start. Anything else, especially a signal, is a crash."""
_log = logging.getLogger("ctpo_sandbox.supervise")


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
                if self._stopping():
                    return None
                _log.error("%s", error)
                self._early_exits += 1

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping() and time.monotonic() < deadline:
            time.sleep(START_POLL_S)


class Supervisor:
    """Runs `python -m ctpo_sandbox.server` with `arguments`, which set `port`; restarts: how often it crashed.

    SIGTERM and SIGINT are forwarded to the server, and nothing is restarted after them.
    """

    def __init__(self, arguments: Sequence[str], port: int) -> None:
        self._command = [sys.executable, "-m", "ctpo_sandbox.server", *arguments, "--parent-pid", str(os.getpid())]
        self._server: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._restarter = Restarter(
            self._start,
            port,
            stopping=lambda: self._stopping,
            pauses_s=SUPERVISE_PAUSES_S,
            steady_s=SUPERVISE_STEADY_S,
        )

    @property
    def restarts(self) -> int:
        return self._restarter.restarts

    def run(self) -> int:
        """Run until a signal arrives, or the server cannot start; returns the exit status. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        status = self._restarter.run(self._start(), is_final=self._is_final)
        if status is None:
            return 0
        return status if status >= 0 else 128 - status

    def _is_final(self, status: int) -> bool:
        """Whether the first server never came up; later the port may be taken for a while."""
        return status in _NOT_A_CRASH and not self.restarts

    def _start(self) -> subprocess.Popen[bytes]:
        self._server = subprocess.Popen(self._command, env=environment(), start_new_session=True)
        if self._stopping:  # the signal arrived before there was a process to forward it to
            self._server.terminate()
        return self._server

    def _pass_on(self, number: int, _: object) -> None:
        self._stopping = True
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(number)


def environment() -> dict[str, str]:
    """Our environment, in which this package can be imported."""
    path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
