"""`ctpo sandbox serve --supervise`: a server that is restarted at its address until the supervisor is stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from ctpo_sandbox.launch import environment
from ctpo_sandbox.restart import Restarter
from ctpo_sandbox.timeouts import SUPERVISE_PAUSES_S, SUPERVISE_STEADY_S

_NOT_A_CRASH = (0, 1)
"""Exit status of a server that was stopped, or could not start. Anything else, especially a signal, is a crash."""


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
