"""The sandbox as a service of its node: found by who runs there, kept up, measured together with others."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from ctpo_launchers import LaunchError
from ctpo_launchers.services import sandbox
from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.config import load_config
from ctpo_sandbox import SandboxClient
from ctpo_sandbox.variables import node_url
from tests.sandbox.conftest import ended_server, wait_until
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        return bool(health(url))
    except httpx.TransportError:
        return False


def test_a_supervised_server_is_started_again_at_its_address_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    port, announced = _free_port(), tmp_path / "url"
    command = [sys.executable, "-m", "ctpo_sandbox.server", "--supervise", "--port", str(port), "--slots", "1"]
    command += ["--tiers", "stdlib", "--require", "none", "--level", "none", "--announce", str(announced)]
    path = os.pathsep.join(sys.path)
    with (tmp_path / "log").open("wb") as log:
        supervisor = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(url), "the first start", scaled(60))
        assert announced.read_text().strip() == url
        (server,) = psutil.Process(supervisor.pid).children()
        server.kill()
        assert wait_for([server], scaled(10)) == []
        wait_until(lambda: _answers(url), "the second start", scaled(60))
        client = SandboxClient(url, max_concurrency=1, request_timeout_s=scaled(30))
        assert asyncio.run(client.run("print('up')", run_timeout_s=9)).stdout == "up\n"
        family = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.send_signal(signal.SIGTERM)
        supervisor.wait(scaled(30))
        assert wait_for(family, scaled(10)) == []
    finally:
        supervisor.kill()
    assert "ended with status -9; starting it again" in (tmp_path / "log").read_text()


def test_a_server_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = ended_server("--supervise", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert ended.stderr.count("did not start") == 1 and "in use" in ended.stderr


def test_the_sandbox_of_a_node_is_named_in_the_environment_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CTPO_SANDBOX_URL", "CTPO_SANDBOX_URL_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert node_url() is None
    file = tmp_path / "url"
    monkeypatch.setenv("CTPO_SANDBOX_URL_FILE", str(file))
    with pytest.raises(ValueError, match=r"No such file.*--announce"):
        node_url()
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        node_url()
    file.write_text("http://127.0.0.1:1\n")
    assert node_url() == "http://127.0.0.1:1"
    monkeypatch.setenv("CTPO_SANDBOX_URL", "http://127.0.0.1:2")
    assert node_url() == "http://127.0.0.1:2"


def test_a_node_program_takes_the_sandbox_that_its_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(Path("configs/quickstart.yaml"))

    async def variables() -> dict[str, str]:
        async with sandbox(config.sandbox, tmp_path / "log", tmp_path / "token") as found:
            return found

    monkeypatch.setenv("CTPO_SANDBOX_URL", "http://127.0.0.1:1")
    assert asyncio.run(variables()) == {} and not (tmp_path / "log").exists()
    monkeypatch.delenv("CTPO_SANDBOX_URL")
    monkeypatch.setenv("CTPO_SANDBOX_URL_FILE", str(tmp_path / "gone"))
    with pytest.raises(LaunchError, match="CTPO_SANDBOX_URL_FILE"):
        asyncio.run(variables())


def test_a_server_whose_parent_has_ended_does_not_start() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = ended_server("--tiers", "stdlib", "--parent-pid", str(gone.pid))
    said = f"ctpo sandbox did not start: parent process {gone.pid} (--parent-pid) has ended\n"
    assert (done.returncode, done.stderr) == (1, said)
