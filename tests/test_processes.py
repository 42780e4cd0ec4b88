"""The end of processes: what is reported ended is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from ctpo_megatron.base.processes import end_all, runs
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
