"""The end of processes: what is reported ended is, and what ends with another does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from ctpo_megatron.base.processes import end_all, runs, wait_for
from ctpo_megatron.base.stop import end_with
from tests.support.deadlines import scaled

# The kernel needs time to free so much.
_LARGE = "import sys, time; held = b'x' * (500 << 20); print(flush=True); time.sleep(600)"
_FAMILY = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_LARGE!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[list[psutil.Process]]:
    """A child, and its large child."""
    with subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        processes = [psutil.Process(child.pid), psutil.Process(int(child.stdout.readline()))]
        yield processes
        end_all(processes, scaled(30))


def test_all_have_ended_children_or_not(family: list[psutil.Process]) -> None:
    assert [runs(each) for each in family] == [True, True]
    assert end_all(family, scaled(30)) == []
    assert [runs(each) for each in family] == [False, False]
    assert end_all(family, 0) == []  # zombies and missing ones


def test_what_still_runs_is_returned(family: list[psutil.Process]) -> None:
    assert family[1] in end_all(family, 0)


def test_their_end_is_waited_for(family: list[psutil.Process]) -> None:
    assert wait_for(family, 0.05) == family
    threading.Timer(0.2, family[0].kill).start()
    threading.Timer(0.4, family[1].kill).start()
    assert wait_for(family, scaled(30)) == []


def _being_reaped(pid: int, flags: int = 0) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_one_that_is_being_reaped_is_waited_for(family: list[psutil.Process], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", _being_reaped)
    assert end_all(family, scaled(30)) == []


@pytest.mark.parametrize("state", ["runs", "is gone", "is being reaped"])
def test_a_process_ends_with_another(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = subprocess.Popen(["sleep", "600"])
    if state == "is gone":
        other.kill()
        other.wait()
    if state == "is being reaped":
        monkeypatch.setattr(os, "pidfd_open", _being_reaped)
    if (pid := os.fork()) == 0:
        end_with(other.pid)
        time.sleep(scaled(60))
        os._exit(0)
    if state == "runs":
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    other.kill()
    other.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
