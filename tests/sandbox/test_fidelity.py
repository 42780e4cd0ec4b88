"""Typical programs end as they do under `python -u main.py`: byte for byte on stdout, and with the same last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_sandbox import SandboxServer
from tests.sandbox.conftest import Runner
from tests.sandbox.fidelity import HEAVY, PROGRAMS, STDIN
from tests.sandbox.sandbox_http import post
from tests.support.deadlines import scaled

ENVIRONMENT = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Python as a terminal starts it: in the background of a shell it would ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n % 3 == 0 else pytest.mark.slow) for n in range(len(PROGRAMS))]
)
def test_as_under_python(sandbox_server: SandboxServer, tmp_path: Path, number: int) -> None:
    _assert_alike(sandbox_server, tmp_path, PROGRAMS[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(HEAVY)))
def test_as_under_python_with_libraries(sandbox_server: SandboxServer, tmp_path: Path, number: int) -> None:
    _assert_alike(sandbox_server, tmp_path, HEAVY[number])


def _assert_alike(server: SandboxServer, folder: Path, program: str) -> None:
    (folder / "main.py").write_text(program)
    command = [sys.executable, "-u", "-X", "utf8", "main.py"]
    options = {"capture_output": True, "text": True, "timeout": scaled(60), "check": False, "env": ENVIRONMENT}
    plain = subprocess.run(command, cwd=folder, input=STDIN, **options)
    ours = post(server, {"code": program, "stdin": STDIN, "run_timeout": scaled(8)}).json()["run_result"]
    assert ours["stdout"] == plain.stdout.replace(str(folder / "main.py"), "main.py")
    assert ours["return_code"] == plain.returncode
    said = ours["stderr"].partition("[killed by signal")[0]
    assert said.strip().splitlines()[-1:] == plain.stderr.strip().splitlines()[-1:]


def test_printing_beyond_the_limit_is_cut_and_no_error(execute: Runner) -> None:
    result = execute("for i in range(1_200_000): print('1234567890')\nimport sys; print('end', file=sys.stderr)")
    assert (result.status, result.stderr) == ("success", "end\n")
    assert result.stdout.endswith("[output cut: the first 1000000 of 8388608 bytes]\n")
    assert "[output cut: the first 1000000 of" in execute("import os\nwhile True: os.write(2, b'x' * 10**6)").stderr
