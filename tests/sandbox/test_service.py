"""The HTTP contract, the pool under load and loss, and a server that ends when it should."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from ctpo_sandbox import SandboxClient, SandboxStartError, SandboxUnavailable, start_server

_PATH = "/faas/sandbox/"


def _post(server, **request) -> httpx.Response:
    body = json.dumps({"code": "print(1)", **request})
    headers = {"content-type": "application/json"}
    return httpx.post(server.url + _PATH, content=body, headers=headers, timeout=30, trust_env=False)


def _running_snippet(url: str) -> psutil.Process:
    found: list[psutil.Process] = []

    def look() -> bool:
        workers = [pid for pid in _health(url)["workers"] if pid is not None]
        found.extend(child for pid in workers for child in psutil.Process(pid).children())
        return bool(found)

    _wait_until(look, "a snippet to start")
    return found[0]


@contextmanager
def _endless_run(url: str) -> Iterator[psutil.Process]:
    """The process of a snippet that runs until its request's connection is closed."""
    address = httpx.URL(url)
    body = json.dumps({"code": "while True: pass", "run_timeout": 9})
    head = f"POST {_PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        connection.sendall((head + body).encode())
        yield _running_snippet(url)


def _gone(processes: list[psutil.Process]) -> bool:
    """Dead; whether the machine's init has reaped an orphan yet is not ours to promise."""
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def _wait_until(condition, awaited: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {awaited}"
        time.sleep(0.02)


def _health(url: str) -> dict:
    return httpx.get(f"{url}/health", timeout=10, trust_env=False).json()


def test_reply_has_the_contract(sandbox_server):
    reply = _post(sandbox_server).json()
    assert reply["status"] == reply["run_result"]["status"] == "success"
    assert reply["run_result"]["stdout"] == "1\n"
    assert reply["run_result"]["stderr"] == ""
    assert "T" in reply["created_at"]


def test_other_languages_are_refused(sandbox_server):
    response = _post(sandbox_server, language="cpp\ud800")
    assert response.status_code == 400
    assert "python" in response.json()["detail"]


@pytest.mark.parametrize("field", ["run_timeout", "compile_timeout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1, "soon", None])
def test_bad_timeouts_are_422(sandbox_server, field, value):
    response = _post(sandbox_server, **{field: value})
    assert response.status_code == 422
    assert field in str(response.json()["detail"])


def test_code_is_required(sandbox_server):
    response = httpx.post(sandbox_server.url + _PATH, json={"stdin": "\ud7ff"}, timeout=10, trust_env=False)
    assert response.status_code == 422


def test_health_states_what_is_enforced(sandbox_server):
    health = _health(sandbox_server.url)
    assert health["slots"] == 2
    assert health["enforced"] and health["not_enforced"]


def test_concurrent_mixed_runs_do_not_mix(sandbox_server):
    async def all_of_them():
        client = SandboxClient(sandbox_server.url, max_concurrency=20, request_timeout_s=60)
        kinds = {
            "success": "print({0}, input())",
            "runtime_error": "import sys\nprint({0}, input())\nsys.exit(1)",
            "timeout": "print({0}, input(), flush=True)\nwhile True: pass",
        }
        expected = [list(kinds)[index % 10 % 3] if index % 5 else "timeout" for index in range(20)]
        runs = [
            client.run(kinds[kind].format(index), stdin=f"in-{index}\n", run_timeout_s=0.5 if kind == "timeout" else 15)
            for index, kind in enumerate(expected)
        ]
        results = await asyncio.gather(*runs)
        await client.aclose()
        return expected, results, client.stats

    expected, results, stats = asyncio.run(all_of_them())
    assert [result.status for result in results] == expected
    assert [result.stdout for result in results] == [f"{index} in-{index}\n" for index in range(20)]
    assert (stats.requests, stats.retries, stats.results.total()) == (20, 0, 20)


def test_killed_workers_are_replaced_and_the_run_retried(sandbox_server, execute):
    before = _health(sandbox_server.url)
    for pid in before["workers"]:
        os.kill(pid, signal.SIGKILL)
    assert execute("print('again')").stdout == "again\n"
    assert _health(sandbox_server.url)["worker_restarts"] > before["worker_restarts"]


def test_worker_killed_during_a_run(sandbox_server):
    async def killed_once():
        client = SandboxClient(sandbox_server.url, max_concurrency=2, request_timeout_s=30)
        run = asyncio.ensure_future(client.run("import time; time.sleep(1); print('done')", run_timeout_s=10))
        snippet = await asyncio.to_thread(_running_snippet, sandbox_server.url)
        os.kill(snippet.ppid(), signal.SIGKILL)
        result = await run
        await client.aclose()
        return result, snippet

    result, orphan = asyncio.run(killed_once())
    assert (result.status, result.stdout) == ("success", "done\n")
    _wait_until(lambda: _gone([orphan]), "the child of the killed worker to end")


def test_hanging_up_kills_the_snippet(sandbox_server):
    with _endless_run(sandbox_server.url) as snippet:
        assert not _gone([snippet])
    _wait_until(lambda: _gone([snippet]), "the snippet of a client that left to end", timeout_s=5)
    _wait_until(lambda: _health(sandbox_server.url)["idle"] == 2, "its slot to be free", timeout_s=5)


def test_nothing_runs_between_requests(sandbox_server, execute):
    execute("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()")
    execute("while True: pass", run_timeout_s=0.2)
    workers = psutil.Process(sandbox_server.process.pid).children()
    assert [worker.children() for worker in workers] == [[], []]


def _run_against(url: str, **options) -> tuple[SandboxUnavailable, SandboxClient]:
    client = SandboxClient(url, **{"max_concurrency": 1, "request_timeout_s": 10, **options})
    with pytest.raises(SandboxUnavailable) as caught:
        asyncio.run(client.run("print(1)", run_timeout_s=1))
    return caught.value, client


def test_no_server_is_never_a_result():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    error, client = _run_against(url)
    assert url in str(error) and "ConnectError" in str(error) and "Check that the server runs" in str(error)
    assert (client.stats.retries, client.stats.unavailable) == (4, 1)


def test_silent_server_meets_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error, client = _run_against(f"http://127.0.0.1:{silent.getsockname()[1]}", request_timeout_s=0.3)
    assert "no verdict within 0.3 s" in str(error)
    assert client.stats.unavailable == 1


def test_address_of_something_else(sandbox_server):
    error, client = _run_against(f"{sandbox_server.url}/elsewhere")
    assert "HTTP 404, is this a sandbox?" in str(error)
    assert client.stats.retries == 0


def test_client_refuses_to_call_a_bad_request_a_result(sandbox_server, execute):
    with pytest.raises(ValueError, match="422"):
        execute("print(1)", run_timeout_s=-1.0)


def test_server_that_cannot_start_says_why(tmp_path: Path):
    with pytest.raises(SandboxStartError, match="invalid choice: 'moon'"):
        start_server(
            slots=1, memory_mb=256, max_run_timeout_s=1, start_timeout_s=30, log_path=tmp_path / "log", require="moon"
        )


def test_server_ends_with_its_parent(tmp_path: Path):
    code = """
import pathlib, time
from ctpo_sandbox import start_server
server = start_server(slots=1, memory_mb=256, max_run_timeout_s=9, start_timeout_s=30, log_path=pathlib.Path("log"))
print(server.process.pid, server.url, flush=True)
time.sleep(60)
"""
    root = str(Path(__file__).parents[2] / "sandbox")
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, url = parent.stdout.readline().split()
        with _endless_run(url):
            family = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
            assert len(family) == 3
            parent.kill()
            _wait_until(lambda: _gone(family), "server, worker and snippet to end with their parent")
    assert list(tmp_path.glob("ctpo-sandbox-*")) == []


def test_stopping_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    log = tmp_path / "log"
    with start_server(slots=2, memory_mb=256, max_run_timeout_s=9, start_timeout_s=30, log_path=log) as server:
        directories = list(tmp_path.glob("ctpo-sandbox-*/worker-*"))
        with _endless_run(server.url) as snippet:
            os.kill(snippet.ppid(), signal.SIGKILL)
    assert len(directories) == 2
    assert list(tmp_path.iterdir()) == [log]


def test_workers_end_with_a_killed_server(tmp_path: Path):
    server = start_server(slots=1, memory_mb=256, max_run_timeout_s=9, start_timeout_s=30, log_path=tmp_path / "log")
    with _endless_run(server.url):
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) == 2
        server.process.kill()
        _wait_until(lambda: _gone(family), "worker and snippet to end with their server")
    server.stop()


def test_importing_the_front_door_is_light():
    code = "import sys, ctpo_sandbox; assert not {'torch', 'fastapi', 'ctpo_megatron'} & set(sys.modules)"
    root = str(Path(__file__).parents[2] / "sandbox")
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, timeout=60, check=True)
