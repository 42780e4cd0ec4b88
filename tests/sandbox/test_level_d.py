"""Level D is no isolation from the user that runs it: what is done all the same, and where it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_sandbox import Limits, confine
from ctpo_sandbox.confine import Confinement
from tests.sandbox.conftest import runner
from tests.sandbox.other_users import HOSTS, OTHER_USER, ROOT, Host, command_as, ids, open_folder, server_of

pytestmark = [pytest.mark.xdist_group("sandbox-users"), pytest.mark.slow]

OPEN_OTHERS = """
import os
opened = []
for process in filter(str.isdigit, os.listdir("/proc")):
    if int(process) == os.getpid():
        continue
    for name, mode in (("mem", "rb"), ("mem", "r+b"), ("environ", "rb"), ("maps", "rb"), ("auxv", "rb")):
        try:
            with open(f"/proc/{process}/{name}", mode, 0) as file:
                if name == "mem" or file.read(1):
                    opened.append((process, name))
        except OSError:
            pass
    for call, name in ((os.readlink, "cwd"), (os.listdir, "fd"), (os.listdir, "map_files")):
        try:
            call(f"/proc/{process}/{name}")
            opened.append((process, name))
        except OSError:
            pass
def of_its_user(process):
    try:
        return os.stat(f"/proc/{process}").st_uid == os.getuid()
    except FileNotFoundError:  # it has ended meanwhile
        return False
print(any(of_its_user(process) for process in os.listdir("/proc") if process.isdigit()), opened)
"""
"""Processes of the same user: the server, its templates, its workers and the run of another slot."""


@pytest.mark.parametrize("host", [host for host in HOSTS if host.level == "seccomp"], ids=ids)
def test_no_process_of_the_server_can_be_opened(host: Host) -> None:
    with server_of(host) as (url, _), runner(url) as run:
        assert run(OPEN_OTHERS).stdout == "True []\n"


@pytest.mark.parametrize("host", [host for host in HOSTS if host.user == OTHER_USER], ids=ids)
def test_nor_can_it_by_another_program_of_its_user(host: Host) -> None:
    """As a run of another server would be, at level D."""
    with server_of(host) as (url, folder), runner(url) as run:
        assert run("print(1)").stdout == "1\n"
        other = command_as(OTHER_USER, folder / "other", [sys.executable, "-c", OPEN_OTHERS])
        found = subprocess.run(other, capture_output=True, text=True, check=True)
    assert found.stdout == "True []\n"


def test_it_is_refused_to_root_without_users_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(confine, "_hidden_from_others", lambda: "/root")
    with pytest.raises(OSError, match=r"level D needs users of their own .* \(/root\)"):
        Confinement("seccomp", Limits(), [60706])
    with pytest.raises(OSError, match=r"level D needs users of their own .* no free user ids are mapped here"):
        Confinement("seccomp", Limits(), [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert Confinement("seccomp", Limits(), []).missing == {"own user": "the server is not root"}


START = """
import sys, types
from pathlib import Path
from ctpo_sandbox import launch, Limits
launch.start_server = lambda **_: types.SimpleNamespace(health={"level": sys.argv[1]})
settings = types.SimpleNamespace(slots=1, start_timeout_s=1, require="none", warm="", **Limits().__dict__)
launch.start_configured_server(settings, Path("log"))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("level", "hidden"), [("seccomp", True), ("landlock", False)])
def test_a_process_that_starts_a_server_at_level_d_hides_too(level: str, hidden: bool) -> None:
    with open_folder() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "sandbox")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment, "text": True}
        trainer = command_as(OTHER_USER, folder, [sys.executable, "-c", START, level])
        with subprocess.Popen(trainer, **pipes) as process:
            assert process.stdout is not None and process.stdout.readline() == "\n"
            look = f"open('/proc/{process.pid}/environ', 'rb').read(); open('/proc/{process.pid}/mem', 'r+b')"
            other = command_as(OTHER_USER, folder / "other", [sys.executable, "-c", look])
            found = subprocess.run(other, capture_output=True, text=True, check=False)
            process.communicate("")
    assert ("PermissionError" in found.stderr) == hidden, found
    assert not Path("log").exists()
