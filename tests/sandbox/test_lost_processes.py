"""A worker or template that fails in the middle of something: every request ends with a verdict or an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ctpo_sandbox import Limits, SandboxStartError, start_server
from ctpo_sandbox.errors import RunFault, WorkerLost
from ctpo_sandbox.libraries import BUILT_IN
from ctpo_sandbox.pool import Pool, RunResult
from ctpo_sandbox.processes import Template, Worker
from tests.support.deadlines import scaled

STDLIB = BUILT_IN[0]


@asynccontextmanager
async def one_slot() -> AsyncIterator[Pool]:
    pool = Pool(
        slots=1, limits=Limits(), level="none", libraries=[STDLIB], start_timeout_s=scaled(60), max_waiting=4
    )  # fmt: skip
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()


def test_a_worker_lost_while_it_cleans_up_after_a_fault_leaves_no_request_without_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A real worker, but for its first run and the clean-up after it: nobody hits those two moments from outside."""
    faults: list[Exception] = [RunFault("killed by signal 9", passes=False)]
    losses = [WorkerLost("died")]
    run, finish = Worker.run, Worker.finish

    async def scripted_run(worker: Worker, *arguments: object) -> object:
        if faults:
            raise faults.pop()
        return await run(worker, *arguments)  # type: ignore[arg-type]

    async def scripted_finish(worker: Worker) -> None:
        if losses and not faults:
            raise losses.pop()
        await finish(worker)

    monkeypatch.setattr(Worker, "run", scripted_run)
    monkeypatch.setattr(Worker, "finish", scripted_finish)

    async def run_one() -> tuple[str, int]:
        async with one_slot() as pool, asyncio.timeout(scaled(20)):
            return (await pool.run("print('well')", "", 9.0)).stdout, pool.restarts

    assert asyncio.run(run_one()) == ("well\n", 1)


BAD = b"the program that ends its worker"


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Real workers that die of one program; every program that they ran. No program known to us does that today."""
    ran: list[bytes] = []
    run = Worker.run

    async def dying_run(worker: Worker, files: list[int], run_timeout_s: float) -> object:
        code = os.pread(files[0], 100, 0)
        ran.append(code)
        if code == BAD:
            raise WorkerLost("died", raised=True)
        return await run(worker, files, run_timeout_s)

    monkeypatch.setattr(Worker, "run", dying_run)
    return ran


def test_a_program_that_ends_one_worker_after_another_gets_a_verdict(fragile: list[bytes]) -> None:
    async def run_three() -> list[RunResult]:
        async with one_slot() as pool, asyncio.timeout(scaled(20)):
            return [await pool.run(code, "", 9.0) for code in ("print('well')", BAD.decode(), "print('well')")]

    first, bad, last = asyncio.run(run_three())
    assert (first.stdout, last.stdout) == ("well\n", "well\n")
    assert (bad.outcome.timed_out, bad.outcome.exit_code) == (False, -signal.SIGKILL)
    assert "ended its worker 2 times" in bad.outcome.killed_for
    assert fragile.count(BAD) == 2


def test_workers_that_die_of_any_program_are_no_verdict(fragile: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is at fault then."""
    monkeypatch.setattr("ctpo_sandbox.pool._HARMLESS", BAD)

    async def run_one() -> None:
        async with one_slot() as pool, asyncio.timeout(scaled(20)):
            await pool.run(BAD.decode(), "", 9.0)

    with pytest.raises(RunFault, match="died; then died"):
        asyncio.run(run_one())


def test_a_pool_that_is_closed_leaves_no_request_without_an_answer() -> None:
    async def close_during_a_run() -> None:
        async with one_slot() as pool:
            run = asyncio.ensure_future(pool.run("import time; time.sleep(60)", "", 60.0))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(scaled(20)):
            await run

    with pytest.raises(Exception, match="the server ends"):
        asyncio.run(close_during_a_run())


def killed_as_they_start(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of the next processes that are started."""
    numbers = itertools.count()

    class Killed(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if next(numbers) < times:
                self.kill()

    monkeypatch.setattr(subprocess, "Popen", Killed)


def test_a_template_that_is_killed_as_it_first_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    killed_as_they_start(2, monkeypatch)

    async def run_one() -> tuple[str, int]:
        async with one_slot() as pool, asyncio.timeout(scaled(60)):
            return (await pool.run("print('well')", "", 9.0)).stdout, pool.lost

    assert asyncio.run(run_one()) == ("well\n", 2)


def test_a_template_that_is_always_killed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    killed_as_they_start(3, monkeypatch)

    async def start() -> None:
        async with one_slot():
            pass

    with pytest.raises(WorkerLost, match=r"the template of stdlib .* died instead of being there to start"):
        asyncio.run(start())


@pytest.mark.parametrize(("times", "starts"), [(2, True), (3, False)])
def test_a_server_that_is_killed_as_it_first_starts_is_replaced(
    times: int, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed_as_they_start(times, monkeypatch)
    with contextlib.ExitStack() as stack:
        if not starts:
            stack.enter_context(pytest.raises(SandboxStartError, match="it ended with status -9"))
        server = stack.enter_context(
            start_server(slots=1, start_timeout_s=scaled(60), log_path=tmp_path / "log", tiers=("stdlib",))
        )
        assert server.health["status"] == "ok"
    assert caplog.text.count("something killed the sandbox server while it started") == 2


def test_a_template_that_is_slow_to_start_is_gone_afterwards(tmp_path: Path) -> None:
    """Its hello would be taken for the answer to the next request."""
    template = Template(STDLIB, "none", Limits(), tmp_path, start_timeout_s=0.01)

    async def spawn() -> None:
        with pytest.raises(WorkerLost, match=r"waited 0.01 s"):
            await template.spawn(0, str(tmp_path / "slot"))

    try:
        asyncio.run(spawn())
        assert template.pid is None
    finally:
        template.kill()
