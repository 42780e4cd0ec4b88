"""Two runs at once see nothing of each other, also where the kernel has no Landlock."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_sandbox import SandboxServer, SandboxStartError
from ctpo_sandbox.isolation.namespaces import WORK
from ctpo_sandbox.isolation.readable import readable_files, readable_trees
from tests.sandbox.conftest import runner, side_by_side
from tests.sandbox.other_users import AT_C, Host, server_of
from tests.support.deadlines import scaled

START_WITHOUT_LANDLOCK = """
import errno, runpy, sys
import pyseccomp
rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "landlock_create_ruleset")
rules.load()
sys.argv = ["ctpo_sandbox.server", *sys.argv[1:]]
runpy.run_module("ctpo_sandbox.server", run_name="__main__")
"""
"""As on a kernel that was built or started without Landlock."""

SECRET = "the-answer-is-" + "forty-two"
HOLD = f"""
import time
secret = {SECRET!r} * 3
file = open("secret", "w")
file.write(secret)
file.flush()
time.sleep({scaled(2.0)})
print("held")
"""
LOOK = f"""
import os, time
wanted = ("the-answer-is-" + "forty-two").encode()
own = {{str(os.getpid()), str(os.getppid())}}
found = set()

def look(process):
    for name in ("cwd/secret", "root/work/run/secret", "environ", "fd/3"):
        try:
            if wanted in open(f"/proc/{{process}}/{{name}}", "rb").read():
                found.add(name)
        except OSError:
            pass
    try:
        memory = open(f"/proc/{{process}}/mem", "rb")
        for line in open(f"/proc/{{process}}/maps"):
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if "rw" in line and end - start < 1 << 24:
                memory.seek(start)
                if wanted * 3 in memory.read(end - start):
                    found.add("memory")
    except OSError:
        pass

end = time.monotonic() + {scaled(1.0)}
while time.monotonic() < end:
    for process in os.listdir("/proc"):
        if process.isdigit() and process not in own:
            found.add("process")
            look(process)
    time.sleep(0.02)
print(sorted(found))
"""


HOLD_NAMES = f"""
import fcntl, json, os, time
os.symlink({SECRET!r}, "m")
fcntl.lockf(open(json.__file__), fcntl.LOCK_SH)
print(os.getcwd(), flush=True)
time.sleep({scaled(3.0)})
"""
LOOK_FOR_NAMES = """
import fcntl, json, os, struct
own = os.getcwd()
top, name = os.path.dirname(os.path.dirname(own)), os.path.basename(own)
found = []

def look(call, path):
    try:
        found.append((path, call(path)))
    except OSError:
        pass

bases = [f"{top}/slot-{slot}-stdlib-{start}" for slot in range(3) for start in range(1, 3)]
for base in bases:
    if base == os.path.dirname(own):
        continue
    for call in (os.listdir, os.scandir):
        look(call, base)
    for guess in ("run", "0", name):
        for call in (os.readlink, os.lstat, os.stat):
            look(call, f"{base}/{guess}/m")
for process in range(1, 1 << 15):
    if process != os.getpid():
        for link in ("cwd", "root", "exe", "fd/1"):
            look(os.readlink, f"/proc/{process}/{link}")
for call in (os.listdir, os.scandir):
    look(call, top)
lock = fcntl.fcntl(open(json.__file__), fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 0, 0))
print([*found, *[lock for _ in [0] if struct.unpack("hhqqi", lock)[0] != fcntl.F_UNLCK]])
"""
"""By calls that open nothing, and so are not checked by Landlock."""

LIST_THE_BOX = """
import json, os
listed = {path: os.listdir(path) for path in ("/", "/etc", "/dev")}
for name in ("tcp", "udp", "unix", "dev"):
    listed[name] = [line.split()[0] for line in open(f"/proc/net/{name}")]
print(json.dumps(listed))
"""


@pytest.fixture(params=["namespaces-root", "namespaces-user"])
def without_landlock(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SandboxServer]:
    options = ["--slots", "2", "--level", request.param, "--tiers", "stdlib"]
    try:
        server = SandboxServer([sys.executable, "-c", START_WITHOUT_LANDLOCK, *options], tmp_path / "log", scaled(60))
    except SandboxStartError as error:
        if "Operation not permitted" not in str(error):
            raise
        pytest.skip(f"this machine does not offer {request.param}")
    with server:
        assert "landlock" in server.health["missing"]
        yield server


@pytest.mark.xdist_group("sandbox-B")
def test_neighbours_are_invisible_without_landlock(without_landlock: SandboxServer) -> None:
    held, looked = asyncio.run(side_by_side(*((without_landlock.url, code) for code in (HOLD, LOOK))))
    assert held.stdout == "held\n", held
    assert looked.stdout == "[]\n", looked


@pytest.mark.xdist_group("sandbox-B")
def test_nothing_but_the_box_is_visible_without_landlock(without_landlock: SandboxServer) -> None:
    with runner(without_landlock.url) as run:
        listed = json.loads(run(LIST_THE_BOX).stdout)
    bound = [*readable_trees(), *readable_files(), WORK, "/proc", "/tmp"]
    assert set(listed["/"]) <= {Path(path).parts[1] for path in bound}
    assert set(listed["/etc"]) <= {"ld.so.cache", "localtime"}
    assert set(listed["/dev"]) == {"null", "zero", "urandom", "random", "fd", "stdin", "stdout", "stderr"}
    assert [len(listed[name]) for name in ("tcp", "udp", "unix")] == [1, 1, 1]  # the heads of tables
    assert [name for name in listed["dev"] if name.endswith(":")] == ["lo:"]


@pytest.mark.parametrize("host", AT_C)
def test_runs_of_one_user_cannot_ask_for_names_of_each_other(host: Host) -> None:
    with server_of(host) as (url, _):
        held, looked = asyncio.run(side_by_side((url, HOLD_NAMES), (url, LOOK_FOR_NAMES)))
        with runner(url) as run:
            names = [Path(run("import os; print(os.getcwd())").stdout.strip()).name for _ in range(4)]
    assert held.status == "success" and len(Path(held.stdout.strip()).name) == 32
    assert looked.stdout == "[]\n", looked
    assert len(set(names)) == 4
