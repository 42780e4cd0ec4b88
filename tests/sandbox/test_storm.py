"""Hang-ups, killed workers and a server that goes dark, under load: every verdict is right and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from ctpo_sandbox import SandboxClient, SandboxServer, start_server
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

RUNS, CONCURRENCY = 10_000, 64
HANG_UPS, KILLS = 0.05, 0.01
LIMIT_S = scaled(8.0)


def _job(number: int) -> tuple[str, str, str]:
    kinds = [
        (f"print({number}, input())", "success", f"{number} in-{number}\n"),
        (f"print({number}, flush=True)\nraise ValueError", "runtime_error", f"{number}\n"),
        (f"import numpy; print(int(numpy.full(3, {number}).sum()))", "success", f"{3 * number}\n"),
        (f"open('f', 'w').write('{number}'); print(open('f').read())", "success", f"{number}\n"),
    ]
    return kinds[number % len(kinds)]


class _Storm:
    """`runs` requests over three servers, of which the last goes dark in the middle third."""

    def __init__(self, servers: list[SandboxServer], runs: int) -> None:
        self.servers, self.runs = servers, runs
        self.wrong: list[object] = []
        self.kills = self.done = 0
        self._chance = random.Random(0)

    async def blow(self) -> None:
        client = SandboxClient(
            [server.url for server in self.servers], max_concurrency=CONCURRENCY, request_timeout_s=scaled(300)
        )
        await asyncio.gather(*(self._one(client, number) for number in range(self.runs)))
        await client.aclose()
        self.unavailable = client.stats.unavailable

    async def _one(self, client: SandboxClient, number: int) -> None:
        code, status, stdout = _job(number)
        run = client.run(code, stdin=f"in-{number}\n", run_timeout_s=LIMIT_S)
        if self._chance.random() < HANG_UPS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(run, self._chance.random() * 0.2)
        else:
            result = await run
            if (result.status, result.stdout) != (status, stdout):
                self.wrong.append((number, result))
        self.done += 1
        if self._chance.random() < KILLS:
            killed = await asyncio.to_thread(self._kill_a_worker)  # `+=` with await in it would lose others' counts
            self.kills += killed
        if self.done in (self.runs // 3, 2 * self.runs // 3):
            dark = self.done == self.runs // 3
            self.servers[-1].process.send_signal(signal.SIGSTOP if dark else signal.SIGCONT)

    def _kill_a_worker(self) -> int:
        workers = [pid for pid in health(self._chance.choice(self.servers[:-1]).url)["workers"] if pid is not None]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._chance.choice(workers), signal.SIGKILL)
            return 1
        return 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("sandbox-load")
def test_a_storm_loses_no_verdict(tmp_path: Path) -> None:
    options = {"slots": 2, "start_timeout_s": scaled(60), "tiers": ["stdlib", "numpy"]}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_server(**options, log_path=tmp_path / name)) for name in ("a", "b", "c")]
        storm = _Storm(servers, RUNS)
        asyncio.run(storm.blow())
        restarts = sum(health(server.url)["restarts"] for server in servers)
        assert [server.restarts for server in servers] == [0, 0, 0]
    assert storm.wrong == [] and storm.unavailable == 0
    assert restarts <= storm.kills  # none of a hang-up
