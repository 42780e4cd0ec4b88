"""The HTTP contract, the pool under load and loss, and a server that ends when it should."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from ctpo_sandbox import SandboxClient, SandboxServer, SandboxStartError, SandboxUnavailable, server, start_server
from ctpo_sandbox.variables import authorization
from tests.sandbox.conftest import SANDBOX, client_of, ended_server, small_server, wait_until
from tests.sandbox.sandbox_http import HTTP, health, post
from tests.support.deadlines import scaled

_PATH = "/faas/sandbox/"
TIERS = ("stdlib", "numpy")


def _post(server, **request) -> httpx.Response:
    return post(server, {"code": "print(1)", **request})


def _running_snippet(url: str) -> psutil.Process:
    def look() -> list[psutil.Process]:
        workers = [pid for pid in health(url)["workers"] if pid is not None]
        return [child for pid in workers for child in psutil.Process(pid).children()]

    return wait_until(look, "a snippet to start")[0]


@contextmanager
def _endless_run(url: str) -> Iterator[psutil.Process]:
    """The process of a snippet that runs until its request's connection is closed."""
    address = httpx.URL(url)
    body = json.dumps({"code": "while True: pass", "run_timeout": 60})
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.host, address.port), timeout=10) as connection:
        connection.sendall((head + body).encode())
        yield _running_snippet(url)


def _gone(processes: list[psutil.Process]) -> bool:
    """Dead; whether the machine's init has reaped an orphan yet is not ours to promise."""
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


def _lost(url: str) -> float:
    lines = HTTP.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("ctpo_sandbox_lost{"))


def test_reply_has_the_contract(sandbox_server):
    reply = _post(sandbox_server).json()
    assert reply["status"] == reply["run_result"]["status"] == "success"
    assert reply["run_result"]["stdout"] == "1\n"
    assert reply["run_result"]["stderr"] == ""
    assert "T" in reply["created_at"]


@pytest.mark.parametrize("field", ["run_timeout", "compile_timeout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1, "soon", None])
def test_bad_timeouts_are_422(sandbox_server, field, value):
    response = _post(sandbox_server, **{field: value})
    assert response.status_code == 422
    assert field in str(response.json()["detail"])


def test_killed_workers_are_replaced_and_the_run_retried(sandbox_server, execute):
    before = health(sandbox_server.url)
    lost = _lost(sandbox_server.url)
    for pid in filter(None, before["workers"]):
        os.kill(pid, signal.SIGKILL)
    for _ in range(before["slots"]):
        assert execute("print('again')").stdout == "again\n"
    assert health(sandbox_server.url)["restarts"] > before["restarts"]
    assert _lost(sandbox_server.url) > lost


def test_worker_killed_during_a_run(sandbox_server):
    async def killed_once():
        async with client_of(sandbox_server.url) as client:
            run = asyncio.ensure_future(client.run("import time; time.sleep(1); print('done')", run_timeout_s=10))
            snippet = await asyncio.to_thread(_running_snippet, sandbox_server.url)
            os.kill(snippet.ppid(), signal.SIGKILL)
            return await run, snippet

    result, orphan = asyncio.run(killed_once())
    assert (result.status, result.stdout) == ("success", "done\n")
    wait_until(lambda: _gone([orphan]), "the child of the killed worker to end")


def test_hanging_up_kills_the_snippet(sandbox_server):
    with _endless_run(sandbox_server.url) as snippet:
        assert not _gone([snippet])
    wait_until(lambda: _gone([snippet]), "the snippet of a client that left to end", timeout_s=scaled(5))
    wait_until(lambda: health(sandbox_server.url)["idle"] == 2, "its slot to be free", timeout_s=scaled(5))


def _run_against(url: str, **options) -> tuple[SandboxUnavailable, SandboxClient]:
    client = SandboxClient(url, **{"max_concurrency": 1, "request_timeout_s": 10, **options})
    with pytest.raises(SandboxUnavailable) as caught:
        asyncio.run(client.run("print(1)", run_timeout_s=1))
    return caught.value, client


def test_no_server_is_never_a_result():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    error, client = _run_against(url, request_timeout_s=1.0)
    assert url in str(error) and "Connect" in str(error) and "Check that the server runs" in str(error)
    assert client.stats.unavailable == 1
    assert 1 < client.stats.retries <= 4  # the fourth after 0.7 s, where the machine keeps up


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
        start_server(slots=1, start_timeout_s=scaled(30), log_path=tmp_path / "log", require="moon")


def test_server_ends_with_its_parent(tmp_path: Path):
    code = """
import pathlib, time
from ctpo_sandbox import start_server
server = start_server(slots=1, start_timeout_s=60, log_path=pathlib.Path("log"))
print(server.process.pid, server.url, flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(SANDBOX), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid, url = parent.stdout.readline().split()
            with _endless_run(url):
                family = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
                assert len(family) >= 6  # server, a template of each tier, a worker, its snippet
                parent.kill()
                wait_until(lambda: _gone(family), "the server and all its processes to end with their parent")
        finally:
            parent.kill()  # its server ends with it
    wait_until(lambda: not list(tmp_path.glob("ctpo-sandbox-*")), "its files to go")


def test_stopping_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with small_server(tmp_path, slots=2, tiers=TIERS) as server:
        directories = list(tmp_path.glob("ctpo-sandbox-*/box-*"))
        with _endless_run(server.url) as snippet:
            os.kill(snippet.ppid(), signal.SIGKILL)
    assert len(directories) == len(TIERS)
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


def test_a_killed_server_takes_everything_along_and_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with small_server(tmp_path, tiers=TIERS) as server:
        (before,) = tmp_path.glob("ctpo-sandbox-*")
        with _endless_run(server.url):
            family = psutil.Process(server.process.pid).children(recursive=True)
            assert len(family) >= 4  # a template of each tier, a worker, its snippet
            server.process.kill()
            wait_until(lambda: _gone(family), "templates, worker and snippet to end with their server")
        client = SandboxClient(server.url, max_concurrency=1, request_timeout_s=scaled(30))
        assert asyncio.run(client.run("print('back')", run_timeout_s=4)).stdout == "back\n"
        assert server.restarts == 1 and client.stats.retries > 0
        wait_until(lambda: not before.exists(), "the files of the killed server to go")
    assert list(tmp_path.iterdir()) == [tmp_path / "log"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--level", "none", "--require", "namespaces"], "--level none does not satisfy --require namespaces"),
        (["--warm", "json,no_such_module"], "--warm: cannot find no_such_module"),
        (
            ["--host", "0.0.0.0"],
            "--host 0.0.0.0 is not a loopback address: anyone could run code. Set SANDBOX_TOKEN",
        ),
        (["--host", "::"], "--host :: is not a loopback address"),
        (["--threads", "2049"], "--threads 2049: memory_mb = 512 has room"),
    ],
)
def test_a_start_that_cannot_be_is_refused(options: list[str], said: str):
    done = ended_server(*options, SANDBOX_TOKEN="")
    assert done.returncode == 1 and said in done.stderr


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ("secret\n", 0o600, ""),
        ("secret", 0o640, "can be read or written by other users; type chmod 600"),
        ("\n", 0o600, "is empty"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_token_file_is_its_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, mode: int, said: str
):
    path = tmp_path / "token"
    monkeypatch.delenv("SANDBOX_TOKEN", raising=False)
    monkeypatch.setenv("SANDBOX_TOKEN_FILE", str(path))
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    if said:
        with pytest.raises(ValueError, match=said):
            authorization()
        assert said in ended_server().stderr
    else:
        assert authorization() == {"authorization": "Bearer secret"}


def test_token_is_asked_for_and_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "secret-of-the-test")
    with small_server(tmp_path) as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret-of-the-test"}):
            response = HTTP.post(server.url + _PATH, json={"code": "1"}, headers=headers)
            assert response.status_code == 401
            assert [HTTP.get(f"{server.url}/{path}").status_code for path in ("live", "ready")] == [200, 200]
            assert HTTP.get(f"{server.url}/health").status_code == 401
        client = SandboxClient(server.url, max_concurrency=1, request_timeout_s=10)
        assert asyncio.run(client.run("print(1)", run_timeout_s=1)).stdout == "1\n"
        monkeypatch.delenv("SANDBOX_TOKEN")
        error, _ = _run_against(server.url)
        assert "wants a bearer token" in str(error)
    assert "secret-of-the-test" not in (tmp_path / "log").read_text()


def test_metrics_count_verdicts_and_refusals(sandbox_server, execute):
    def counted() -> dict[str, float]:
        text = HTTP.get(f"{sandbox_server.url}/metrics").text
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}

    before = counted()
    execute("print(1)")
    execute("1/0")
    _post(sandbox_server, language="cpp")
    after = counted()
    node = f'node="{socket.gethostname()}"'
    for name, label in (
        ("runs", 'status="success"'),
        ("runs", 'status="runtime_error"'),
        ("rejected", 'code="400"'),
    ):  # fmt: skip
        series = f"ctpo_sandbox_{name}_total{{{','.join(sorted((node, label)))}}}"
        assert after[series] == before.get(series, 0) + 1, series
    assert after[f"ctpo_sandbox_slots{{{node}}}"] == after[f"ctpo_sandbox_idle_slots{{{node}}}"] == 2


@pytest.mark.parametrize(
    ("code", "status", "run_status", "return_code"),
    [
        ("print(7)", "Success", "Finished", 0),
        ("1/0", "Failed", "Finished", 1),
        ("while True: pass", "Failed", "TimeLimitExceeded", -9),
    ],
)
def test_sandbox_fusion_words(sandbox_server, code, status, run_status, return_code):
    body = {"code": code, "language": "python", "run_timeout": 0.5, "memory_limit_MB": 1024, "files": {}}
    reply = HTTP.post(f"{sandbox_server.url}/run_code", json=body).json()
    assert (reply["status"], reply["run_result"]["status"]) == (status, run_status)
    assert reply["run_result"]["return_code"] == return_code
    assert reply["run_result"]["execution_time"] > 0


def _ctpo(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(str(folder) for folder in (root, root / "sandbox", root / "kernels"))
    command = [sys.executable, "-m", "ctpo_megatron.cli", "sandbox", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths, **options}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(120), check=False)


def test_smoke_passes_on_a_good_server(sandbox_server):
    done = _ctpo("smoke", "--url", sandbox_server.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") >= 12 and "FAILED" not in done.stdout


@pytest.mark.slow
def test_smoke_fails_on_a_server_without_isolation(tmp_path: Path):
    with small_server(tmp_path, tiers=(), level="none", require="none") as server:
        done = _ctpo("smoke", "--url", server.url)
    assert done.returncode == 1
    assert "FAILED no other program: expected runtime_error, got success" in done.stdout


@pytest.mark.parametrize("option", ["--require", "--level"])
def test_seccomp_alone_is_refused_with_the_ways(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        server.main(["--port", "0", option, "seccomp"])
    said = capsys.readouterr().err
    assert f"argument {option}: seccomp alone is no level any more" in said
    assert "--require none (sandbox.require) inside a virtual machine or gVisor" in said and "sandbox.url" in said


def test_a_slow_start_is_an_error_and_no_reason_for_less_isolation():
    done = _ctpo("serve", "--port", "0", "--require", "none", "--start-timeout-s", "0.01")
    assert done.returncode == 1
    assert done.stderr.count("waited 0.01 s for the template of") == 1
    assert "raise --start-timeout-s (sandbox.start_timeout_s)" in done.stderr
    assert "No weaker isolation was tried" in done.stderr and "no isolation that satisfies" not in done.stderr


@pytest.mark.parametrize(
    ("platform", "release", "said"),
    [
        ("darwin", "25.0.0", "Linux only, not on darwin"),
        ("linux", "5.10.0-32-amd64", "this is Linux 5.10.0-32-amd64, and isolation needs 5.14 or newer: "),
    ],
)
def test_other_systems_are_refused(
    platform: str, release: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr("platform.release", lambda: release)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert server.main(["--port", "0"]) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert said in capsys.readouterr().err


def test_what_programs_will_miss_is_said_at_the_start(tmp_path: Path):
    """With numpy and sympy hidden, as in an environment that has the service alone."""
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in ("numpy", "sympy") else found(name, package)
from ctpo_sandbox.server import main
sys.exit(main())
"""
    command = [sys.executable, "-c", code, "--slots", "1", "--require", "none"]
    with SandboxServer(command, tmp_path / "log", scaled(60)) as server:
        assert server.health["not_installed"] == ["numpy", "sympy"]
        assert list(server.health["templates"]) == ["stdlib"]
    log = (tmp_path / "log").read_text()
    assert "NOT INSTALLED: numpy, sympy." in log and "ctpo-megatron[sandbox-math]" in log


def test_a_run_can_have_modules_imported_ahead(tmp_path: Path):
    with small_server(tmp_path, warm=["xml.dom", "wave"]) as server:
        assert server.health["libraries"]["extra"][-2:] == ["xml.dom", "wave"]


def test_a_program_gets_the_tier_of_what_it_imports():
    from ctpo_sandbox.inside.libraries import choose, tiers

    available = tiers(["xml.dom"])
    assert [tier.name for tier in available] == ["stdlib", "numpy", "sympy", "extra"]
    chosen = {code: choose(code, available) for code in ("x = 1", "import numpy", "from sympy import *", "import xml")}
    assert list(chosen.values()) == ["stdlib", "numpy", "sympy", "extra"]
    assert choose("numpyish = sympy_ = 1", available) == "stdlib"
    assert [tier.name for tier in tiers(wanted=["numpy"])] == ["stdlib", "numpy"]
    assert [tier.name for tier in tiers(["xml.dom"], ["stdlib"])] == ["stdlib", "extra"]
    assert choose("import sympy, numpy", tiers(wanted=["numpy"])) == "numpy"
    with pytest.raises(ValueError, match=r"--tiers: there is no scipy; there are \['stdlib', 'numpy', 'sympy'\]"):
        tiers(wanted=["numpy", "scipy"])
