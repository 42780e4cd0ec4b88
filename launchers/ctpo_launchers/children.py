"""Child processes of a node program, and their cleanup: no process stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ctpo_launchers.timeouts import CHILD_POLL_S, KILL_TIMEOUT_S
from ctpo_megatron.base.processes import runs
from ctpo_megatron.base.stop import children_spared

_TAIL_LINES = 15


class Child:
    """A process in its own session, with all its descendants. Its output is appended to `log`.

    spared: it ignores stop signals, which Slurm may send to every process of a job.
    """

    def __init__(
        self,
        kind: str,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        spared: bool,
    ) -> None:
        self.kind, self.log = kind, log
        self._start_of_log = log.stat().st_size if log.exists() else 0
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(log.open("ab"))
            if spared:
                stack.enter_context(children_spared())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ctpo_launchers.child", kind, *arguments],
                stdin=subprocess.PIPE,  # open until this process ends: `ctpo_launchers.child` watches it
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, 128 + n for signal n; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    async def wait(self, timeout_s: float | None = None) -> int:
        """Return the exit status. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while (status := self.status) is None:
                await asyncio.sleep(CHILD_POLL_S)
            return status

    def signal(self, number: int) -> None:
        """Forward a signal, if the process still runs."""
        if self.status is None:
            self._process.send_signal(number)

    def output(self) -> bytes:
        """Its output since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_log)
            return file.read()

    def log_tail(self) -> str:
        """Return the end of its log, for a message."""
        lines = self.output().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"last lines of {self.log}:", *lines])

    async def echo(self) -> None:
        """Copy its output to ours, until cancelled and then to its end."""
        with self.log.open("rb") as file:
            file.seek(self._start_of_log)
            try:
                while True:
                    _copy(file.read())
                    await asyncio.sleep(CHILD_POLL_S)
            finally:
                _copy(file.read())

    async def kill(self) -> None:
        """Kill it and all its descendants. Raises RuntimeError when a process survives."""
        family = _of_session(self.pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(self.pid).children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while alive := [process for process in family if runs(process)]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of {self.kind} are still there: {alive}")
            await asyncio.sleep(CHILD_POLL_S)
        self._process.wait()


def _of_session(session: int) -> list[psutil.Process]:
    """Processes of a session, including orphans: Ray's agents survive a killed node."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == session:
                found.append(psutil.Process(pid))
    return found


def _copy(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
