"""Many runs at once, processes lost in the middle of them, and requests that nobody would write by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctpo_sandbox import ClientStats, ExecutionResult, Limits, SandboxServer
from tests.sandbox.conftest import client_of, small_server
from tests.sandbox.sandbox_http import health, post
from tests.support.deadlines import scaled

CONCURRENCY = 32
VERDICTS_PER_KILL, KILL_OF_THE_SERVER = 10, 12
LIMIT_S = scaled(6.0)
GROWTH = 18 * 2**20  # bytes, however many runs there are: allocators settle within the first hundreds


def _job(index: int) -> tuple[str, str, str]:
    """Code, verdict and stdout of run `index`: a mixture of verdicts and libraries, each with its own number in it."""
    kinds = {
        "print": (f"print({index}, input())", "success", f"{index} in-{index}\n"),
        "error": (f"print({index}, input())\nraise ValueError({index})", "runtime_error", f"{index} in-{index}\n"),
        "exit": (f"import sys\nprint({index})\nsys.exit(3)", "runtime_error", f"{index}\n"),
        "numpy": (f"import numpy\nprint(int(numpy.full(3, {index}).sum()))", "success", f"{3 * index}\n"),
        "sympy": (f"import sympy\nx = sympy.Symbol('x')\nprint(sympy.diff({index} * x, x))", "success", f"{index}\n"),
        "file": (f"open('f', 'w').write('{index}')\nprint(open('f').read())", "success", f"{index}\n"),
        "signal": (f"import os\nprint({index}, flush=True)\nos.abort()", "runtime_error", f"{index}\n"),
        "flood": (f"print('{index} ' * 1000)", "success", f"{index} " * 1000 + "\n"),
    }
    names = list(kinds)
    return kinds[names[index % len(names)]]


async def _all(url: str, count: int, concurrency: int) -> tuple[list[ExecutionResult], Any]:
    async with client_of(url, concurrency=concurrency, deadline_s=scaled(120)) as client:
        jobs = [client.run(_job(i)[0], stdin=f"in-{i}\n", run_timeout_s=LIMIT_S) for i in range(count)]
        return await asyncio.gather(*jobs), client.stats


def _assert_right(results: list[ExecutionResult]) -> None:
    wrong = [(i, result) for i, result in enumerate(results) if (result.status, result.stdout) != _job(i)[1:]]
    assert wrong == []


def _footprint(server: SandboxServer) -> dict[str, Any]:
    process = psutil.Process(server.process.pid)
    workers = [psutil.Process(pid) for pid in health(server.url)["workers"] if pid is not None]
    return {
        "descriptors": process.num_fds() + sum(worker.num_fds() for worker in workers),
        "processes": len(process.children(recursive=True)),
        "runs": sum(len(worker.children()) for worker in workers),
        "memory": process.memory_info().rss + sum(worker.memory_info().rss for worker in workers),
    }


@pytest.mark.xdist_group("sandbox-load")
@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_many_runs_do_not_mix_nor_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with small_server(tmp_path, slots=3, limits=Limits(run_timeout_s=LIMIT_S), tiers=()) as server:
        _assert_right(asyncio.run(_all(server.url, 200, CONCURRENCY))[0])  # every worker of every slot is there now
        files, before = sorted(tmp_path.rglob("*")), _footprint(server)
        results, stats = asyncio.run(_all(server.url, count, CONCURRENCY))
        after = _footprint(server)
        assert sorted(tmp_path.rglob("*")) == files
    _assert_right(results)
    assert (stats.retries, stats.unavailable, stats.results["timeout"]) == (0, 0, 0)
    assert after["runs"] == 0 and after["processes"] == before["processes"]
    assert after["descriptors"] <= before["descriptors"] + 2  # a connection may not be closed yet
    assert after["memory"] - before["memory"] < GROWTH


def test_cpu_contention_is_no_timeout(sandbox_server: SandboxServer) -> None:
    """40 runs of 0.1 CPU-seconds queue for 2 s and more at a limit of 1.5 s: the clock starts after the queue."""
    code = "import time\nend = time.process_time() + 0.1\nwhile time.process_time() < end: pass\nprint('done')"
    limit_s = scaled(1.5)

    async def all_of_them() -> list[ExecutionResult]:
        async with client_of(sandbox_server.url, concurrency=40, deadline_s=scaled(120)) as client:
            return await asyncio.gather(*(client.run(code, run_timeout_s=limit_s) for _ in range(40)))

    assert {result.status for result in asyncio.run(all_of_them())} == {"success"}


@pytest.mark.xdist_group("sandbox-load")
@pytest.mark.parametrize("count", [130, pytest.param(600, marks=pytest.mark.slow)])
def test_chaos_never_changes_a_verdict(tmp_path: Path, count: int) -> None:
    """Templates, workers and snippets are killed at random under load, the whole server once.

    Every tenth verdict brings the next kill: by the clock, a slow machine would lose its templates before they are up.
    """
    with small_server(tmp_path, slots=3, limits=Limits(run_timeout_s=LIMIT_S), tiers=()) as server:
        results, stats, kills = asyncio.run(_under_fire(server, count))
        _assert_right(results)
        assert kills == count // VERDICTS_PER_KILL and server.restarts == 1
        assert stats.unavailable == 0 and stats.results["timeout"] == 0 and stats.retries > 0
        _assert_right(asyncio.run(_all(server.url, 40, 8))[0])


async def _under_fire(server: SandboxServer, count: int) -> tuple[list[ExecutionResult], ClientStats, int]:
    """`count` runs, the client's counts, and the number of kills."""
    rng = random.Random(0)
    verdicts = kills = 0

    async def one(index: int) -> ExecutionResult:
        nonlocal verdicts, kills
        result = await client.run(_job(index)[0], stdin=f"in-{index}\n", run_timeout_s=LIMIT_S)
        verdicts += 1
        if verdicts % VERDICTS_PER_KILL == 0:
            kills += 1
            victims = [server.process.pid] if kills == KILL_OF_THE_SERVER else await _processes(server.url)
            _kill(rng.choice(victims))
        return result

    async with client_of(server.url, concurrency=16, deadline_s=scaled(200)) as client:
        results = await asyncio.gather(*(one(index) for index in range(count)))
    return results, client.stats, kills


async def _processes(url: str) -> list[int]:
    """Templates and workers; waits for a server that has just been killed."""
    async with asyncio.timeout(scaled(60)):
        while True:
            with contextlib.suppress(httpx.TransportError):
                now = await asyncio.to_thread(health, url)
                found = [pid for pid in [*now["workers"], *now["templates"].values()] if pid is not None]
                if found:
                    return found
            await asyncio.sleep(0.05)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


TEXT = st.text(st.characters(), max_size=40)  # surrogates included
few = settings(max_examples=60, derandomize=True)


@few
@given(text=TEXT, stdin=TEXT)
def test_any_text_comes_back_as_it_went(sandbox_server: SandboxServer, text: str, stdin: str) -> None:
    """Through JSON, a memory file and a decoding that replaces what is no text."""
    code = f"import sys\nsys.stdout.buffer.write({text.encode('utf-8', 'surrogatepass')!r} + sys.stdin.buffer.read())"
    reply = post(sandbox_server, {"code": code, "stdin": stdin}).json()
    sent = text.encode("utf-8", "surrogatepass") + stdin.encode("utf-8", "surrogatepass")
    assert reply["status"] == "success"
    assert reply["run_result"]["stdout"] == sent.decode("utf-8", "replace")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["code", "stdin", "language", "compile_timeout", "run_timeout", "files", "other"])


@few
@given(body=st.dictionaries(FIELDS, JSON, max_size=7) | JSON)
def test_any_json_is_answered_with_a_verdict_or_a_refusal(sandbox_server: SandboxServer, body: Any) -> None:
    response = post(sandbox_server, body)
    assert response.status_code in (200, 400, 422)
    if response.status_code == 200:
        assert response.json()["status"] in ("success", "timeout", "runtime_error")
    else:
        assert response.json()["detail"]
