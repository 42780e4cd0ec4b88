"""The variables of a run name its own directory, for Python and for C, and setting them keeps no memory."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctpo_sandbox import libc
from tests.sandbox.conftest import Runner

NAME = "CTPO_TEST_VARIABLE"
OF_C = "ctypes.CDLL(None).getenv"
PROGRAM = f"""
import ctypes, os
getenv = {OF_C}
getenv.restype = ctypes.c_char_p
print({{(os.environ[name], os.getenv(name), getenv(name.encode()).decode()) for name in ("HOME", "TMPDIR", "PWD")}}
      == {{(os.getcwd(),) * 3}})
"""


@pytest.fixture
def unset() -> Iterator[None]:
    yield
    os.environ.pop(NAME, None)


def of_c(name: str) -> bytes | None:
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value: bytes | None = getenv(name.encode())
    return value


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.usefixtures("unset")
def test_a_variable_is_seen_by_python_and_c_and_can_be_unset() -> None:
    for value in ("a", "longer than before", "ü"):
        libc.set_variable(NAME, value)
        assert os.environ[NAME] == value and of_c(NAME) == value.encode()
    os.environ[NAME] = "of Python"
    assert of_c(NAME) == b"of Python"
    libc.set_variable(NAME, "again")
    assert of_c(NAME) == b"again"
    del os.environ[NAME]
    assert of_c(NAME) is None


@pytest.mark.usefixtures("unset")
def test_values_of_earlier_runs_are_not_kept() -> None:
    def many(first: int) -> None:
        for number in range(first, first + 20_000):
            libc.set_variable(NAME, f"{number:0200}")

    many(0)
    before = resident_bytes()
    many(20_000)
    assert resident_bytes() - before < 2 << 20  # setenv would keep 4 MB


def test_a_variable_that_cannot_be_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(libc, "_libc", SimpleNamespace(putenv=refused))
    with pytest.raises(OSError, match=f"putenv {NAME}"):
        libc.set_variable(NAME, "a")
    assert NAME not in os.environ


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
            assert (result.status, result.stdout) == ("success", "True\n"), result
