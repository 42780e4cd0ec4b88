"""Servers that run as another user, or give users of their own to runs, for tests that run as root.

Both need an interpreter and sources that other users may read. Where they are below a closed directory, as pyenv's
interpreters in root's home, the server runs in mounts of its own: there that directory is open and holds nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ctpo_sandbox import SandboxServer
from ctpo_sandbox.isolation.readable import readable_trees
from tests.sandbox.conftest import SHARED_MEMORY, Runner, runner
from tests.support.deadlines import scaled

ROOT = Path(__file__).parents[2]
OTHER_USER = 64000 + os.getpid() % 1000
"""A user id that no process of this machine has."""

OPEN_MOUNTS = """
set -e
scratch=$1 hidden=$2 trees=$3
shift 3
for tree in $trees; do mkdir -p "$scratch$tree"; mount --rbind "$tree" "$scratch$tree"; done
for closed in $hidden; do mount -t tmpfs -o mode=0755 none "$closed"; done
for tree in $trees; do mkdir -p "$tree"; mount --rbind "$scratch$tree" "$tree"; done
exec "$@"
"""


@dataclass(frozen=True)
class Host:
    """How a server runs. user: its user id; 0 with an interpreter that others may read: its runs have their own. None:
    as the tests run.
    """

    name: str
    level: str
    user: int | None = None


HOSTS = [
    Host("C with users of its own", "landlock", 0),
    Host("C as a user", "landlock", OTHER_USER),
    Host("B as a user", "namespaces-user", OTHER_USER),
]
TWICE = {"B", "C with users of its own", "C as a user"}
"""Of `make test-slow` where tests run everywhere: others have the same walls, and the same kind of user."""
EVERYWHERE = [
    pytest.param(host, marks=pytest.mark.slow if host.name in TWICE else (), id=host.name)
    for host in (Host("A", "namespaces-root"), Host("B", "namespaces-user"), Host("C", "landlock"), *HOSTS)
]
AT_C = [host for host in EVERYWHERE if host.values[0].level == "landlock"]


def ids(host: Host) -> str:
    """The name of a test's parameter."""
    return host.name


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder to which every user may write, in memory where there is room."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2**30 else None
    with tempfile.TemporaryDirectory(dir=parent) as name:
        Path(name).chmod(0o1777)
        yield Path(name)


def command_as(user: int | None, folder: Path, command: list[str]) -> list[str]:
    """`command` as `Host.user`. Skips the test that cannot have it."""
    if user is None:
        return command
    if os.geteuid() != 0:
        pytest.skip("only root starts servers as other users")
    prefix = [] if user == 0 else ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    trees = (*readable_trees(), sys.prefix, sys.base_prefix, str(ROOT))
    hidden = {tree: closed for tree in trees if (closed := _closed_above(Path(tree)))}
    if hidden:
        scratch = folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        lists = [" ".join(sorted(set(names))) for names in (hidden.values(), hidden)]
        prefix = ["unshare", "--mount", "sh", "-c", OPEN_MOUNTS, "sh", str(scratch), *lists, *prefix]
    return [*prefix, *command]


def _closed_above(tree: Path) -> str | None:
    """The topmost directory on the way to it that other users may not enter, if there is one."""
    closed = [str(path) for path in (tree, *tree.parents) if not path.stat().st_mode & 0o001]
    return closed[-1] if closed else None


@contextlib.contextmanager
def open_interpreter() -> Iterator[None]:
    """Servers of root that start inside have an interpreter that every user may read: runs have users of their own."""
    if os.geteuid() != 0:
        yield
        return
    with open_folder() as folder, pytest.MonkeyPatch.context() as patch:

        class Server(SandboxServer):
            def __init__(self, command: list[str], log_path: Path, start_timeout_s: float) -> None:
                super().__init__(command_as(0, folder, command), log_path, start_timeout_s)

        patch.setattr("ctpo_sandbox.launch.SandboxServer", Server)
        yield


@contextlib.contextmanager
def server_of(host: Host, *options: str) -> Iterator[tuple[str, Path]]:
    """The URL of a server, and the folder in which its runs have their directories."""
    with open_folder() as folder, contextlib.ExitStack() as stack:
        announce, log = folder / "url", folder / "log"
        command = [sys.executable, "-m", "ctpo_sandbox.server", "--port", "0", "--announce", str(announce)]
        command += ["--level", host.level, "--require", "none", "--tiers", "stdlib", "--slots", "2", *options]
        environment = {**os.environ, "TMPDIR": str(folder), "HOME": str(folder), "PYTHONPATH": str(ROOT / "sandbox")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command_as(host.user, folder, command), env=environment, stderr=output, start_new_session=True
            )
        stack.callback(_end, process)
        deadline = time.monotonic() + scaled(60)
        while not announce.exists():
            if process.poll() is not None and "no isolation that satisfies" in log.read_text():
                pytest.skip(f"this machine does not offer {host.name}: {log.read_text()[-300:]}")
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.02)
        yield announce.read_text().strip(), folder


@contextlib.contextmanager
def runner_of(host: Host, *options: str) -> Iterator[Runner]:
    """`client.run` of such a server as a plain function."""
    with server_of(host, *options) as (url, _), runner(url) as run:
        yield run


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(scaled(10))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(scaled(10))
