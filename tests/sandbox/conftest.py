"""Real servers for the whole folder, and client calls that need no event loop in the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctpo_sandbox import ExecutionResult, Limits, SandboxClient, SandboxServer, start_server
from tests.support.deadlines import scaled

Runner = Callable[..., ExecutionResult]
SANDBOX = Path(__file__).parents[2] / "sandbox"
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def sandbox_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    """At the strongest level that the machine offers, with every tier of libraries."""
    log: Path = tmp_path_factory.mktemp("sandbox") / "server.log"
    with start_server(slots=2, limits=Limits(memory_mb=384), start_timeout_s=scaled(60), log_path=log) as server:
        yield server


@pytest.fixture(scope="session")
def execute(sandbox_server: SandboxServer) -> Iterator[Runner]:
    with runner(sandbox_server.url) as run:
        yield run


def small_server(folder: Path, **options: Any) -> SandboxServer:
    """One slot with the standard library, but for the options."""
    usual = {"slots": 1, "start_timeout_s": scaled(60), "tiers": ["stdlib"]}
    return start_server(**usual | options, log_path=folder / "log")


@contextmanager
def server_in_memory(**options: Any) -> Iterator[SandboxServer]:
    """A server that keeps the files of runs in memory, if there is room: a slow disk is not what is tested.

    The disk of a virtual machine may need 2 ms for each directory that it removes.
    """
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2**30:
                folder = stack.enter_context(tempfile.TemporaryDirectory(dir=SHARED_MEMORY))
                Path(folder).chmod(0o711)  # runs may have a user of their own
                patch.setenv("TMPDIR", folder)
            server = start_server(**options)
        yield stack.enter_context(server)


@pytest.fixture
def server_at(tmp_path: Path) -> Callable[[str], AbstractContextManager[Runner]]:
    """A server of its own at a level of isolation."""

    @contextmanager
    def start(level: str) -> Iterator[Runner]:
        with small_server(tmp_path, require="none", level=level) as server, runner(server.url) as run:
            yield run

    return start


@contextmanager
def runner(url: str) -> Iterator[Runner]:
    """`client.run` as a plain function, over connections that stay open."""
    client = SandboxClient(url, max_concurrency=1, request_timeout_s=scaled(40))
    with asyncio.Runner() as loop:

        def run(code: str, *, stdin: str = "", run_timeout_s: float = scaled(10)) -> ExecutionResult:
            return loop.run(client.run(code, stdin=stdin, run_timeout_s=run_timeout_s))

        yield run
        loop.run(client.aclose())


@asynccontextmanager
async def client_of(*urls: str, concurrency: int = 8, deadline_s: float = scaled(60)) -> AsyncIterator[SandboxClient]:
    client = SandboxClient([*urls], max_concurrency=concurrency, request_timeout_s=deadline_s)
    try:
        yield client
    finally:
        await client.aclose()


async def side_by_side(*runs: tuple[str, str]) -> list[ExecutionResult]:
    """The results of programs that run at once: address of the server and code of each."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(url)) for url, _ in runs]
        programs = zip(clients, runs, strict=True)
        return await asyncio.gather(*(client.run(code, run_timeout_s=scaled(20)) for client, (_, code) in programs))


def announced(file: Path, server: subprocess.Popen[bytes]) -> str:
    """The address that a server which has been started writes there."""

    def up() -> bool:
        assert server.poll() is None, "the server has ended"
        return file.exists()

    wait_until(up, "the server to come up", scaled(60))
    return file.read_text().strip()


def ended_server(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A server that does not start, run as a command."""
    environment = {**os.environ, "PYTHONPATH": str(SANDBOX)} | variables
    command = [sys.executable, "-m", "ctpo_sandbox.server", "--port", "0", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False)


def wait_until(condition: Callable[[], Any], awaited: str, timeout_s: float = scaled(15)) -> Any:
    """What it returns once that counts as true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {awaited}"
        time.sleep(0.01)
    return found
