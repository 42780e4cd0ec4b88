"""The sandbox as a service of its node: found by who runs there."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from ctpo_launchers import LaunchError
from ctpo_launchers.services import sandbox
from ctpo_megatron.config import load_config
from ctpo_sandbox.variables import node_url
from tests.sandbox.conftest import ended_server


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
