"""A server that ends where nobody reaps its orphans, as in containers without an init."""

from __future__ import annotations

import ctypes
import os
import sys
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
