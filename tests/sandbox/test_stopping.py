"""A server that ends where nobody reaps its orphans, as in containers without an init."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ctpo_sandbox import launch, start_server
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
    monkeypatch.setattr(launch, "_GROUP_GRACE_S", scaled(600))
    with start_server(slots=1, tiers=["stdlib"], start_timeout_s=scaled(30), log_path=tmp_path / "log") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        group = server.process.pid
    dead = [process for process in family if process.is_running()]
    assert {process.status() for process in dead} == {psutil.STATUS_ZOMBIE}
    assert all(os.getpgid(process.pid) == group for process in dead)
    for process in dead:
        os.waitpid(process.pid, 0)
