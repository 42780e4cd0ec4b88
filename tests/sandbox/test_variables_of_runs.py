"""The variables of a run name its own directory, for Python and for C, and setting them keeps no memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ctpo_sandbox.isolation import libc
from tests.sandbox.conftest import Runner

NAME = "CTPO_TEST_VARIABLE"
PROGRAM = """
import ctypes, os
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
for name in ("HOME", "TMPDIR", "PWD"):
    print((os.environ[name], os.getenv(name), getenv(name.encode()).decode()) == (os.getcwd(),) * 3)
    os.environ[name] = "of Python"
    print(getenv(name.encode()) == b"of Python")
    del os.environ[name]
    print(getenv(name.encode()) is None)
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_values_of_earlier_runs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "")  # and unset at the end

    def many(first: int) -> None:
        for number in range(first, first + 20_000):
            libc.set_variable(NAME, f"{number:0200}")

    many(0)
    before = resident_bytes()
    many(20_000)
    assert resident_bytes() - before < 2 << 20  # setenv would keep 4 MB


def test_runs_see_their_own_directory(
    execute: Runner,
    server_at: Callable[[str], AbstractContextManager[Runner]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    with server_at("none") as unconfined:
        for run in (execute, execute, unconfined, unconfined):
            result = run(PROGRAM)
            assert (result.status, result.stdout) == ("success", 9 * "True\n"), result
