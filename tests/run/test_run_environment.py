"""environment.json says which code, command, host and devices a run was started with, and no secret."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.run import describe_environment


def test_it_names_code_command_host_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["ctpo", "train", "a.yaml", "tracking.api_key=secret1", "run.seed=1"])
    facts = describe_environment()
    assert facts["command"] == "ctpo train a.yaml 'tracking.api_key=***' run.seed=1"
    assert facts["host"] == socket.gethostname()
    assert facts["devices"] and all(facts["devices"])
    assert "torch" in facts["packages"]


def test_the_commit_is_that_of_this_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    package = tmp_path / "package"
    package.mkdir()
    file = package / "environment.py"
    file.write_text("x = 1\n")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "of another project"], check=True)
    monkeypatch.setattr("ctpo_megatron.run.provenance.__file__", str(file))
    facts = describe_environment
    assert facts()["commit"] is None  # installed into a project's checkout
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    assert re.fullmatch(r"[0-9a-f]{40}", facts()["commit"])
    file.write_text("x = 2\n")
    assert re.fullmatch(r"[0-9a-f]{40}\+changes", facts()["commit"])
