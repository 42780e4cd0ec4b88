"""Commands that tests run: each in a session of its own that ends with it, with a deadline that shows its output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.deadlines import scaled

_OUTPUT_CHARACTERS = 8000


def run(
    command: Sequence[str],
    *,
    deadline_s: float,
    directory: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Status and output of a command, whatever the status is.

    Whatever it started and left running is killed. Raises AssertionError with the output when it takes longer than
    `scaled(deadline_s)`.
    """
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=None if environment is None else dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=scaled(deadline_s))
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        raise AssertionError(
            f"{' '.join(command)} had not ended after {scaled(deadline_s):g} s and was killed; its output:\n"
            + (out + err)[-_OUTPUT_CHARACTERS:]
        ) from None
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session of a process that was started in one of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Tell whether a process ends within `scaled(30)` s; a zombie has."""
    deadline = time.monotonic() + scaled(30)
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False
