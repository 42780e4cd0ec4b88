"""Who is at fault when servers fail over a program again and again: the program, if they run others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_sandbox import ExecutionResult, SandboxServer, SandboxUnavailable
from tests.sandbox.conftest import client_of
from tests.sandbox.fragile import fragile
from tests.sandbox.sandbox_http import post
from tests.support.deadlines import scaled

WORKER, KILLED, DEFECT = "'WORKER'", "import time; time.sleep(9); 'KILLED'", "'DEFECT'"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with fragile(tmp_path_factory.mktemp("blame")) as server:
        yield server


@pytest.mark.parametrize("program", [WORKER, DEFECT])
def test_a_server_that_fails_again_over_one_program_and_runs_others_blames_it(
    server: SandboxServer, program: str
) -> None:
    async def run_three() -> list[ExecutionResult]:
        async with client_of(server.url) as client:
            results = [await client.run(code, run_timeout_s=4) for code in ("print(1)", program, "print(2)")]
            assert (client.stats.blamed, client.stats.results["runtime_error"]) == (1, 1)
            return results

    first, blamed, last = asyncio.run(run_three())
    assert (first.stdout, last.stdout) == ("1\n", "2\n")
    assert blamed.status == "runtime_error" and "fails over this program" in blamed.stderr


def test_a_run_that_one_machine_kills_again_and_again_is_not_blamed(server: SandboxServer) -> None:
    async def run() -> None:
        async with client_of(server.url, deadline_s=scaled(5)) as client:
            with pytest.raises(SandboxUnavailable):
                await client.run(KILLED, run_timeout_s=9)
            assert client.stats.blamed == 0 and client.stats.retries > 1

    asyncio.run(run())


def test_a_run_that_two_machines_kill_is_blamed(server: SandboxServer, tmp_path: Path) -> None:
    async def run(*servers: SandboxServer) -> ExecutionResult:
        async with client_of(*(server.url for server in servers)) as client:
            return await client.run(KILLED, run_timeout_s=9)

    with fragile(tmp_path, 1) as other:
        result = asyncio.run(run(server, other))
    assert result.status == "runtime_error" and "fails over this program" in result.stderr


def test_servers_that_fail_over_every_program_blame_none(tmp_path: Path) -> None:
    async def run(*servers: SandboxServer) -> None:
        async with client_of(*(server.url for server in servers), deadline_s=scaled(5)) as client:
            with pytest.raises(SandboxUnavailable):
                await client.run("print(1)", run_timeout_s=4)
            assert client.stats.blamed == 0 and client.stats.retries > 2

    with fragile(tmp_path, 0) as one, fragile(tmp_path, 1) as other:
        (tmp_path / "broken").touch()
        asyncio.run(run(one, other))


def test_a_fault_says_over_what_it_was(server: SandboxServer) -> None:
    found = [post(server, {"code": code}) for code in (WORKER, DEFECT, KILLED)]
    assert [reply.status_code for reply in found] == [503] * 3
    assert [reply.headers["x-sandbox-fault"] for reply in found] == ["worker", "defect", "killed"]
