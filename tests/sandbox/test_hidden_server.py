"""No program of a server's user can open its memory, its environment or its files."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.sandbox.conftest import runner
from tests.sandbox.other_users import HOSTS, OTHER_USER, Host, command_as, ids, server_of

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


@pytest.mark.parametrize("host", [host for host in HOSTS if host.user == OTHER_USER], ids=ids)
def test_no_process_of_the_server_can_be_opened(host: Host) -> None:
    with server_of(host) as (url, folder), runner(url) as run:
        assert run("print(1)").stdout == "1\n"
        other = command_as(OTHER_USER, folder / "other", [sys.executable, "-c", OPEN_OTHERS])
        found = subprocess.run(other, capture_output=True, text=True, check=True)
    assert found.stdout == "True []\n"
