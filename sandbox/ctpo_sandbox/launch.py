"""Starts and stops a server next to a trainer, so that a run needs no separate service."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from ctpo_sandbox.errors import SandboxStartError
from ctpo_sandbox.records import Limits, option
from ctpo_sandbox.temporary import folder
from ctpo_sandbox.timeouts import (
    GROUP_GRACE_S,
    RESTART_PAUSE_S,
    START_ATTEMPTS,
    START_POLL_S,
    STOP_TIMEOUT_S,
    TEMPLATE_START_SHARE,
)
from ctpo_sandbox.variables import authorization

_LOG_LINES = 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_log = logging.getLogger("ctpo_sandbox.launch")
_DEFAULT_LIMITS = Limits()


class SandboxServer:
    """A running server, restarted on its port whenever it exits; a context manager that stops it.

    url: its address. health: the first answer of `GET /health`.
    """

    def __init__(self, command: list[str], log_path: Path, start_timeout_s: float) -> None:
        self._command, self._log_path, self._start_timeout_s = command, log_path, start_timeout_s
        self._stopping = threading.Event()
        self.process, self.url, self.health = self._first_start()
        self._port = int(self.url.rpartition(":")[2])
        self.restarts = 0
        """How often the server was restarted."""
        self._watcher = threading.Thread(target=self._keep_up, name="sandbox-watcher", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """Stop the server and all its processes, with SIGKILL after ten seconds. Safe to call twice.

        Raises subprocess.TimeoutExpired when even SIGKILL did not end it.
        """
        self._stopping.set()
        _stop(self.process)
        self._watcher.join(6 * STOP_TIMEOUT_S)  # it may be stopping the last server, and starting another
        if self._watcher.is_alive():
            _log.error("a sandbox server that was starting again does not stop; it ends with this process")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _first_start(self) -> tuple[subprocess.Popen[bytes], str, dict[str, Any]]:
        for _ in range(START_ATTEMPTS - 1):
            try:
                return self._start(port=0)
            except SandboxStartError as error:
                if not error.killed:
                    raise
                _log.warning("something killed the sandbox server while it started, another starts: %s", error)
        return self._start(port=0)

    def _start(self, port: int) -> tuple[subprocess.Popen[bytes], str, dict[str, Any]]:
        deadline = time.monotonic() + self._start_timeout_s
        with folder("ctpo-sandbox-start-") as directory:
            announce = directory / "url"
            with self._log_path.open("ab") as log:
                process = subprocess.Popen(
                    [*self._command, "--port", str(port), "--announce", str(announce)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_environment(),
                    start_new_session=True,
                )
            try:
                url = self._wait_for_url(process, announce, deadline)
                return process, url, self._wait_for_health(process, url, deadline)
            except SandboxStartError as problem:
                killed = process.poll() == -signal.SIGKILL  # not by `_stop`
                _stop(process)
                raise SandboxStartError(
                    f"the sandbox server did not start within {self._start_timeout_s:g} s: {problem}. "
                    f"Last lines of {self._log_path}:\n{_tail(self._log_path)}",
                    killed=killed,
                ) from None
            except BaseException:
                _stop(process)
                raise

    def _check_start(self, process: subprocess.Popen[bytes], deadline: float, awaited: str) -> None:
        if process.poll() is not None:
            raise SandboxStartError(f"it ended with status {process.returncode}")
        if self._stopping.is_set():
            raise SandboxStartError("it was stopped meanwhile")
        if time.monotonic() > deadline:
            raise SandboxStartError(f"it runs but {awaited}")

    def _wait_for_url(self, process: subprocess.Popen[bytes], announce: Path, deadline: float) -> str:
        while not announce.exists():
            self._check_start(process, deadline, "has not announced its port")
            time.sleep(START_POLL_S)
        return announce.read_text().strip()

    def _wait_for_health(self, process: subprocess.Popen[bytes], url: str, deadline: float) -> dict[str, Any]:
        with httpx.Client(trust_env=False, headers=authorization()) as http:
            while True:
                self._check_start(process, deadline, "does not answer GET /health")
                left_s = max(START_POLL_S, deadline - time.monotonic())
                try:
                    response = http.get(f"{url}/health", timeout=min(left_s, STOP_TIMEOUT_S))
                    if response.status_code == httpx.codes.OK:
                        health: dict[str, Any] = response.json()
                        return health
                except httpx.TransportError:
                    time.sleep(START_POLL_S)

    def _keep_up(self) -> None:
        """Restart the server on its port whenever it exits, until `stop`: at once, then after each failed start."""
        while True:
            status, pause_s = self.process.wait(), 0.0
            while not self._stopping.wait(pause_s):
                self.restarts += 1
                _log.error("the sandbox server ended with status %d; starting it again on port %d", status, self._port)
                _stop(self.process)  # its templates and workers may have survived it
                try:
                    self.process, _, _ = self._start(self._port)
                    break
                except SandboxStartError as error:
                    _log.error("%s", error)
                    pause_s = RESTART_PAUSE_S
            if self._stopping.is_set():  # `stop` may have seen the old process
                return _stop(self.process)


def _environment() -> dict[str, str]:
    """Our environment, in which this package can be imported."""
    path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # hurry: no caller waits for its answers any more
        with contextlib.suppress(subprocess.TimeoutExpired):  # handled by the group kill below
            process.wait(STOP_TIMEOUT_S)
    # Templates and workers share the server's process group; a snippet has its own but dies with its worker. They exit
    # by themselves and remove their files.
    deadline = time.monotonic() + GROUP_GRACE_S
    while _is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(START_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_TIMEOUT_S)


def _is_alive(group: int) -> bool:
    """Whether a process of the group is alive; zombies stay in it until reaped, in some containers forever."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            # As bytes: the name in it is a program's, and need not be text.
            state, _, of = status.read_bytes().rpartition(b")")[2].split()[:3]
            if int(of) == group and state not in b"ZX":
                return True
    return False


def start_server(
    *,
    slots: int,
    start_timeout_s: float,
    log_path: Path,
    require: str = "landlock",
    level: str | None = None,
    limits: Limits = _DEFAULT_LIMITS,
    tiers: Sequence[str] = (),
    warm: Sequence[str] = (),
) -> SandboxServer:
    """Start a server on a free loopback port and wait until it answers; it ends with the calling process.

    `limits` bound each execution, `slots` how many run at once. `require`, `level`: least isolation, and a forced one;
    `tiers`: preloaded libraries, default all; `warm`: further modules (docs/sandbox.md). Its log is appended to
    `log_path`. Raises SandboxStartError when it exits or is not healthy within `start_timeout_s` seconds.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ctpo_sandbox.server", "--slots", str(slots)]
    command += ["--require", require, "--parent-pid", str(os.getpid())]
    command += ["--start-timeout-s", str(TEMPLATE_START_SHARE * start_timeout_s)]
    command += ["--tiers", ",".join(tiers), "--warm", ",".join(warm), *([] if level is None else ["--level", level])]
    for name, value in asdict(limits).items():
        command += [] if value is None else [option(name), str(value)]
    return SandboxServer(command, log_path, start_timeout_s)


def start_configured_server(settings: Any, log_path: Path) -> SandboxServer:
    """`start_server` with the section `sandbox` of a configuration.

    settings: has slots, start_timeout_s, require, warm (modules, separated by commas), and every limit by its name.
    """
    return start_server(
        slots=settings.slots,
        limits=Limits.of(settings),
        start_timeout_s=settings.start_timeout_s,
        require=settings.require,
        warm=settings.warm.split(","),
        log_path=log_path,
    )


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
