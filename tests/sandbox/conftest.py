"""Real servers for the whole folder, and client calls that need no event loop in the tests."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ctpo_sandbox import ExecutionResult, Limits, SandboxClient, SandboxServer, start_server

Runner = Callable[..., ExecutionResult]


@pytest.fixture(scope="session")
def sandbox_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    """At the strongest level that the machine offers."""
    log: Path = tmp_path_factory.mktemp("sandbox") / "server.log"
    with start_server(slots=2, limits=Limits(memory_mb=384), start_timeout_s=60, log_path=log) as server:
        yield server


@pytest.fixture
def execute(sandbox_server: SandboxServer) -> Runner:
    return runner(sandbox_server.url)


@pytest.fixture
def server_at(tmp_path: Path) -> Callable[[str], AbstractContextManager[Runner]]:
    """A server of its own at a level of isolation."""

    @contextmanager
    def start(level: str) -> Iterator[Runner]:
        options = {"slots": 1, "limits": Limits(memory_mb=384), "start_timeout_s": 60}
        with start_server(**options, log_path=tmp_path / "server.log", level=level, require="none") as server:
            yield runner(server.url)

    return start


def runner(url: str) -> Runner:
    """`client.run` as a plain function."""

    def run(code: str, *, stdin: str = "", run_timeout_s: float = 10.0) -> ExecutionResult:
        async def once() -> ExecutionResult:
            client = SandboxClient(url, max_concurrency=1, request_timeout_s=40)
            try:
                return await client.run(code, stdin=stdin, run_timeout_s=run_timeout_s)
            finally:
                await client.aclose()

        return asyncio.run(once())

    return run
