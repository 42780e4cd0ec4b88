"""Servers are stopped: in containers without an init, which would reap their orphans, and during a restart."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ctpo_sandbox import launch
from ctpo_sandbox.launch import SandboxServer
from tests.support.deadlines import scaled

_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def orphanage() -> Iterator[None]:
    """Orphans become children of this process, which leaves them as they are when they are dead."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("orphanage")
@pytest.mark.timeout(scaled(60))
def test_the_dead_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GROUP_GRACE_S", scaled(600))
    # Whether a worker's dead are reaped before their parent ends is a race; this child of the server nobody reaps.
    start = "import os, runpy; os.fork() or os._exit(0); runpy.run_module('ctpo_sandbox.server', run_name='__main__')"
    command = [sys.executable, "-c", start, "--slots", "1", "--tiers", "stdlib"]
    with SandboxServer(command, tmp_path / "log", scaled(30)) as server:
        group = server.process.pid
        family = psutil.Process(group).children(recursive=True)
    dead = [process for process in family if process.is_running()]
    assert {process.status() for process in dead} == {psutil.STATUS_ZOMBIE}
    assert all(os.getpgid(process.pid) == group for process in dead)
    for process in dead:
        os.waitpid(process.pid, 0)


@pytest.mark.timeout(scaled(60))
def test_one_that_starts_again_is_not_waited_for(tmp_path: Path) -> None:
    start = f"""
import pathlib, runpy, time
started = pathlib.Path({str(tmp_path / "started")!r})
if started.exists():
    started.with_name("again").touch()
    time.sleep(600)
started.touch()
runpy.run_module("ctpo_sandbox.server", run_name="__main__")
"""
    command = [sys.executable, "-c", start, "--slots", "1", "--tiers", "stdlib"]
    server = SandboxServer(command, tmp_path / "log", scaled(600))
    try:
        server.process.send_signal(signal.SIGKILL)
        while not (tmp_path / "again").exists():
            time.sleep(0.01)
    finally:
        began = time.monotonic()
        server.stop()
    assert time.monotonic() - began < scaled(10)
    assert server.restarts == 1 and not server._watcher.is_alive()
