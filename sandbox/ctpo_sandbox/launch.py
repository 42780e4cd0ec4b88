"""Starts and stops a server next to a trainer, so that a run needs no service of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

_POLL_S = 0.05
_STOP_TIMEOUT_S = 10.0
_LOG_LINES = 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])


class SandboxStartError(Exception):
    """The server did not become healthy; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class SandboxServer:
    """A running server and its process; a context manager that stops it."""

    url: str
    process: subprocess.Popen[bytes]
    health: dict[str, Any]

    def stop(self) -> None:
        """End the server and every process of it, by force after ten seconds. Safe to call twice.

        Raises subprocess.TimeoutExpired when even SIGKILL did not end it.
        """
        _stop(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the group kill below is the answer to it
            process.wait(_STOP_TIMEOUT_S)
    # The workers share the server's group; a snippet has its own but dies with its worker.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_TIMEOUT_S)


def start_server(
    *,
    slots: int,
    memory_mb: int,
    max_run_timeout_s: float,
    start_timeout_s: float,
    log_path: Path,
    require: str = "network",
) -> SandboxServer:
    """Start a server on a free loopback port and wait until it answers; it ends with the calling process.

    `memory_mb` and `max_run_timeout_s` bound each execution, `slots` how many run at once. Its log is appended to
    `log_path`. Raises SandboxStartError when it ends or is not healthy within `start_timeout_s` seconds.
    """
    deadline = time.monotonic() + start_timeout_s
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ctpo-sandbox-start-") as directory:
        announce = Path(directory) / "url"
        command = [sys.executable, "-m", "ctpo_sandbox.server", "--port", "0", "--slots", str(slots)]
        command += ["--memory-mb", str(memory_mb), "--max-run-timeout", str(max_run_timeout_s), "--require", require]
        command += ["--announce", str(announce), "--parent-pid", str(os.getpid())]
        path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        try:
            url = _wait_for_url(process, announce, deadline)
            return SandboxServer(url, process, _wait_for_health(process, url, deadline))
        except _NotUp as problem:
            _stop(process)
            raise SandboxStartError(
                f"the sandbox server did not start within {start_timeout_s:g} s: {problem}. "
                f"Last lines of {log_path}:\n{_tail(log_path)}"
            ) from None
        except BaseException:
            _stop(process)
            raise


class _NotUp(Exception):
    """Why the server cannot be used."""


def _check_alive(process: subprocess.Popen[bytes], deadline: float, awaited: str) -> None:
    if process.poll() is not None:
        raise _NotUp(f"it ended with status {process.returncode}")
    if time.monotonic() > deadline:
        raise _NotUp(f"it runs but {awaited}")


def _wait_for_url(process: subprocess.Popen[bytes], announce: Path, deadline: float) -> str:
    while not announce.exists():
        _check_alive(process, deadline, "has not announced its port")
        time.sleep(_POLL_S)
    return announce.read_text().strip()


def _wait_for_health(process: subprocess.Popen[bytes], url: str, deadline: float) -> dict[str, Any]:
    with httpx.Client(trust_env=False) as http:
        while True:
            _check_alive(process, deadline, "does not answer GET /health")
            try:
                response = http.get(f"{url}/health", timeout=max(_POLL_S, deadline - time.monotonic()))
                if response.status_code == httpx.codes.OK:
                    return response.json()
            except httpx.TransportError:
                time.sleep(_POLL_S)


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_LOG_LINES:])
