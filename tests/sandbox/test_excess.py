"""What the kernel does not count at every level: threads, and the files of a run in the server's file system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ctpo_sandbox import ExecutionResult, Limits
from ctpo_sandbox.inside.watch import Watch
from tests.sandbox.conftest import client_of, runner, server_in_memory, small_server
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

DEEP = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\n"
HOARDS = {
    "files": "for i in range(40): open(f'f{i}', 'wb').write(bytes(4 << 20))\n",
    "files without a name": "import os\nkept = []\nfor i in range(40):\n"
    "    kept.append(open('f', 'wb', 0)); os.remove('f'); kept[-1].write(bytes(4 << 20))\n",
    "files in a closed directory": "import os\nos.mkdir('d', 0o300)\n"
    "for i in range(40): open(f'd/f{i}', 'wb').write(bytes(4 << 20))\n",
    "files far down": f"{DEEP}for i in range(40): open(f'f{{i}}', 'wb').write(bytes(4 << 20))\n",
    "files without a name, the first thread gone": "import ctypes, os, threading, time\ndef hoard():\n    kept = []\n"
    "    for i in range(40):\n        kept.append(open('f', 'wb', 0)); os.remove('f'); kept[-1].write(bytes(4 << 20))\n"
    "    time.sleep(9)\nthreading.Thread(target=hoard).start(); ctypes.CDLL(None).syscall(60, 0)\n",
    "empty files": "for i in range(6000): open(f'f{i}', 'wb').close()\n",
    "directories": "import os\nfor i in range(6000): os.mkdir(f'd{i}')\n",
}


@pytest.mark.xdist_group("sandbox-C")
@pytest.mark.parametrize("name", HOARDS)
def test_a_run_that_hoards_files_is_ended(hoarder, name: str) -> None:
    result = hoarder(f"{HOARDS[name]}import time; print('kept', flush=True); time.sleep(9)")
    assert result.status == "runtime_error", result
    assert "[killed " in result.stderr
    assert result.wall_s < scaled(6)


@pytest.fixture(scope="module")
def hoarder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Level C, and where the tests are root without the right to look into others' processes, as in a container."""
    folder = tmp_path_factory.mktemp("hoarder")
    folder.chmod(0o711)
    options = {"slots": 1, "start_timeout_s": scaled(60), "tiers": ["stdlib"], "level": "landlock"}
    with server_in_memory(**options, log_path=folder / "log") as server, runner(server.url) as run:
        yield run


def test_a_run_that_ends_before_its_files_are_counted_has_exceeded_the_limit(tmp_path: Path) -> None:
    with (
        small_server(tmp_path, level="landlock", limits=Limits(disk_files=16)) as server,
        runner(server.url) as run,
    ):
        within, beyond = (run(f"for i in range({n}): open(f'f{{i}}', 'wb').close()") for n in (16, 17))
    assert (within.status, beyond.status) == ("success", "runtime_error")
    assert beyond.stderr == "[killed for more than 64 MB or 16 files]\n"


def test_slow_checks_are_not_far_apart() -> None:
    """On a slow machine counting many files takes seconds, and the run continues meanwhile."""
    moments: list[float] = []

    def slow_check(child: int) -> str:
        moments.append(time.monotonic())
        time.sleep(0.5)
        moments.append(time.monotonic())
        return ""

    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["sleep", "3"]) as child:
        assert Watch(theirs, slow_check).wait(child.pid, 60.0) == ""
    pauses = [begin - end for end, begin in zip(moments[1::2], moments[2::2], strict=False)]
    assert len(pauses) >= 2 and max(pauses) < 1.0


THREADS = """
import threading, time
threading.stack_size(32 << 10)
try:
    for _ in range(2000):
        threading.Thread(target=time.sleep, args=[20], daemon=True).start()
except RuntimeError:
    pass
time.sleep(1)
print("held", threading.active_count())
"""


def test_a_run_that_takes_every_process_costs_no_other_run_its_verdict(tmp_path: Path) -> None:
    """In a group of processes with a limit, as in a container, at a level where the kernel counts no run's threads."""
    options = {"slots": 3, "level": "namespaces-user"}
    with small_server(tmp_path, **options) as server, _few_processes(server.process.pid, 40) as group:
        before = health(server.url)

        async def all_of_them() -> list[ExecutionResult]:
            async with client_of(server.url) as client:
                hostile = asyncio.ensure_future(client.run(THREADS, run_timeout_s=4))
                while (group / "pids.current").read_text() != (group / "pids.max").read_text():
                    await asyncio.sleep(0.005)
                innocent = asyncio.gather(*(client.run(f"print({i})", run_timeout_s=4) for i in range(6)))
                results = [await hostile, *await innocent]
                assert client.stats.retries == 0
                return results

        hostile, *innocent = asyncio.run(all_of_them())
        assert [result.stdout for result in innocent] == [f"{i}\n" for i in range(6)]
        assert "held" in hostile.stdout, hostile
        assert health(server.url)["restarts"] == before["restarts"]


@contextlib.contextmanager
def _few_processes(server: int, spare: int) -> Iterator[Path]:
    """Move it and its family into a control group that has place for `spare` more."""
    roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
    root = next((root for root in roots if (root / "cgroup.procs").exists() and os.access(root, os.W_OK)), None)
    if root is None or (root == roots[1] and "pids" not in (root / "cgroup.subtree_control").read_text().split()):
        pytest.skip("no control group of processes to write to")
    group = root / f"ctpo-test-{os.getpid()}"
    group.mkdir()
    try:
        family = [psutil.Process(server), *psutil.Process(server).children(recursive=True)]
        for process in family:
            (group / "cgroup.procs").write_text(str(process.pid))
        (group / "pids.max").write_text(str(int((group / "pids.current").read_text()) + spare))
        yield group
        (group / "pids.max").write_text("max")
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_a_run_that_takes_too_many_threads_is_ended(server_at) -> None:
    with server_at("namespaces-user") as run:
        result = run(THREADS, run_timeout_s=8)
    assert result.status == "runtime_error"
    assert "[killed for more than 128 threads]" in result.stderr
