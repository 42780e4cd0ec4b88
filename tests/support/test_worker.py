"""What stands in for a Python interpreter of pytest-xdist."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.support.deadlines import scaled
from tests.support.prefork import ROOT, SHARED, Prefork

PROGRAM = "import sys; line = sys.stdin.readline(); print(line.strip() + '!'); print('told', file=sys.stderr); "


@pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_it_reads_writes_and_ends_as_the_program_does(end: str, status: int) -> None:
    with contextlib.closing(Prefork(())) as server:
        command = [sys.executable, "-m", "tests.support.worker", "-u", "-c", PROGRAM + "sys.stdout.flush(); " + end]
        how = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": scaled(60)}
        done = subprocess.run(command, input="asked\n", env=os.environ | {SHARED: server.address}, **how)
    assert (done.returncode, done.stdout, done.stderr) == (status, "asked!\n", "told\n")
