"""Processes of a run that are stopped are named, once, and when they run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from ctpo_megatron.run.stall import StoppedProcesses

_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"


@pytest.fixture
def process() -> Iterator[psutil.Process]:
    """A child with a child of its own."""
    with subprocess.Popen([sys.executable, "-c", _PARENT]) as started:
        found = psutil.Process(started.pid)
        while not found.children():
            time.sleep(0.01)
        yield found
        for each in (*found.children(), found):
            each.kill()


def send(process: psutil.Process, number: signal.Signals, status: str) -> None:
    os.kill(process.pid, number)
    while (process.status() == psutil.STATUS_STOPPED) != (status == psutil.STATUS_STOPPED):
        time.sleep(0.01)


def test_a_process_that_is_stopped_is_named(process: psutil.Process, caplog: pytest.LogCaptureFixture) -> None:
    stopped = StoppedProcesses()
    send(process, signal.SIGSTOP, psutil.STATUS_STOPPED)
    stopped.check()
    assert caplog.text == ""  # it may have been for a moment
    stopped.check()
    stopped.check()
    send(process, signal.SIGCONT, psutil.STATUS_SLEEPING)
    stopped.check()
    stopped.check()
    named, back = (record.getMessage() for record in caplog.records)
    assert f"(process {process.pid}) is stopped; what waits for it continues after kill -CONT {process.pid}" in named
    assert back == f"process {process.pid} is not stopped any more"


def test_what_a_process_runs_for_others_is_its_own_affair(
    process: psutil.Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs of the sandbox stop themselves as they like."""
    [grandchild] = process.children()
    send(grandchild, signal.SIGSTOP, psutil.STATUS_STOPPED)
    stopped = StoppedProcesses()
    stopped.check()
    stopped.check()
    assert caplog.text == ""
