"""Clients that hang up cost no other request anything."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from ctpo_sandbox import SandboxClient, SandboxServer
from tests.sandbox.conftest import client_of, small_server
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

HANG_UPS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> SandboxServer:
    with small_server(tmp_path_factory.mktemp("hang-ups"), slots=2) as server:
        yield server


async def _hang_up(client: SandboxClient, after_s: float) -> None:
    run = asyncio.ensure_future(client.run("import time; time.sleep(5)", run_timeout_s=9))
    await asyncio.sleep(after_s)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def _innocent(client: SandboxClient, until: asyncio.Event) -> int:
    runs = 0
    while not until.is_set():
        assert (await client.run(f"print({runs})", run_timeout_s=9)).stdout == f"{runs}\n"
        runs += 1
    return runs


def test_hanging_up_costs_others_nothing(server: SandboxServer) -> None:
    """After 0 to 30 ms: while the request waits, while its run is set up, and while it runs."""

    async def all_of_them() -> tuple[int, int]:
        async with client_of(server.url) as client:
            over = asyncio.Event()
            innocent = asyncio.ensure_future(_innocent(client, over))
            for number in range(0, HANG_UPS, 3):
                await asyncio.gather(*(_hang_up(client, 0.0005 * (number + i)) for i in range(3)))
            over.set()
            return await innocent, client.stats.retries

    runs, retries = asyncio.run(all_of_them())
    assert runs > 0 and retries == 0
    assert health(server.url)["restarts"] == 0


def test_hanging_up_while_a_worker_is_forked_leaves_the_template_alone(server: SandboxServer) -> None:
    async def hang_up_while_stopped(template: list[psutil.Process]) -> str:
        async with client_of(server.url) as client:
            for process in template:
                process.suspend()
            await _hang_up(client, scaled(0.5))
            for process in template:
                process.resume()
            return (await client.run("print('well')", run_timeout_s=9)).stdout

    before = health(server.url)
    outer = psutil.Process(before["templates"]["stdlib"])
    template = [outer, *outer.children()]  # in a box the process itself is a child of the one that the server knows
    for pid in filter(None, before["workers"]):
        os.kill(pid, signal.SIGKILL)
    assert asyncio.run(hang_up_while_stopped(template)) == "well\n"
    assert health(server.url)["templates"] == before["templates"]
