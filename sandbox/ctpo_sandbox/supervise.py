"""A server that is started again whenever it dies, at the same address, until the supervisor itself is asked to end."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ctpo_sandbox.launch import environment

_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_STEADY_S = 60.0
"""A server that lived longer than this is started again after the first pause."""

_ENDED_BY_ITSELF = (0, 1)
"""Status of a server that ended as asked, or could not start; anything else, a signal above all, is a death."""

_log = logging.getLogger("ctpo_sandbox.supervise")


class Supervisor:
    """Runs `python -m ctpo_sandbox.server` with `arguments`, which must name a port; restarts: how often it died.

    SIGTERM and SIGINT are passed on to it, and nothing is started after them.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.restarts = 0
        self._command = [sys.executable, "-m", "ctpo_sandbox.server", *arguments, "--parent-pid", str(os.getpid())]
        self._server: subprocess.Popen[bytes] | None = None
        self._ends = False

    def run(self) -> int:
        """Until it is asked to end, or the server cannot start; the exit status. From the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        pause_s = _FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            status = self._run_once()
            if self._ends or (status in _ENDED_BY_ITSELF and not self.restarts):
                return status if status >= 0 else 128 - status
            self.restarts += 1
            pause_s = _FIRST_PAUSE_S if time.monotonic() - began > _STEADY_S else min(2 * pause_s, _MAX_PAUSE_S)
            _log.error("the sandbox server ended with status %d; starting it again in %g s", status, pause_s)
            self._wait(pause_s)
            if self._ends:
                return 0

    def _run_once(self) -> int:
        self._server = subprocess.Popen(self._command, env=environment(), start_new_session=True)
        if self._ends:  # the signal came before there was somebody to pass it on to
            self._server.terminate()
        return self._server.wait()

    def _pass_on(self, number: int, _: object) -> None:
        self._ends = True
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(number)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._ends and time.monotonic() < deadline:
            time.sleep(0.05)
