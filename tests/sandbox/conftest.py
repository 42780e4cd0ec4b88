"""Real servers for the whole folder, and client calls that need no event loop in the tests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ctpo_sandbox import ExecutionResult, Limits, SandboxClient, SandboxServer, start_server
from tests.support.deadlines import scaled

Runner = Callable[..., ExecutionResult]
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
    """A server of its own at a level of isolation, with the standard library."""

    @contextmanager
    def start(level: str) -> Iterator[Runner]:
        options = {"slots": 1, "start_timeout_s": scaled(60), "tiers": ["stdlib"], "require": "none"}
        with (
            start_server(**options, log_path=tmp_path / "server.log", level=level) as server,
            runner(server.url) as run,
        ):
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
