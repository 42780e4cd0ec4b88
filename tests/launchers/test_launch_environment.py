"""The launcher's own environment: what is said when it cannot be made. `make test-cluster` makes it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_launchers import LaunchError, environment
from ctpo_launchers.clusters import Cluster
from ctpo_launchers.jobs import Launch
from ctpo_megatron.config import load_config
from tests.support.deadlines import scaled


def test_nothing_is_installed_into_the_checkout() -> None:
    assert not environment.FOLDER.is_relative_to(environment.ROOT)


def test_a_job_has_the_secrets_of_its_configuration_in_a_file_of_its_user(tmp_path: Path) -> None:
    config = load_config(environment.ROOT / "configs" / "quickstart.yaml", ["sandbox.url=http://me:canary0815@h:9"])
    cluster = Cluster(executor="local", job_dir=str(tmp_path / "jobs"))
    launch = Launch(config, cluster, 1, tmp_path)
    for _ in range(2):
        launch.write_config()
    assert stat.S_IMODE(launch.config_file.stat().st_mode) == 0o600
    assert load_config(launch.config_file) == config


def test_what_cannot_be_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No venv is made here: its interpreter is a script that fails as pip would."""
    (tmp_path / "launch.txt").write_text("nemo-run==0\n")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] || { echo no such package >&2; exit 9; }\nmkdir -p "$3/bin" && cp "$0" "$3/bin"\n'
    )
    python.chmod(0o755)
    for name, value in {"REQUIREMENTS": tmp_path / "launch.txt", "FOLDER": tmp_path / "venv"}.items():
        monkeypatch.setattr(environment, name, value)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(LaunchError, match=r"pip install .* ended with status 9"):
        environment.launch([])
    assert "no such package" in capfd.readouterr().err
    assert not (tmp_path / "venv" / "requirements.sha256").exists()


def test_two_launches_make_it_once(tmp_path: Path) -> None:
    """The interpreter is a script here, too: it counts its calls, and takes its time for one."""
    (tmp_path / "launch.txt").write_text("nemo-run==0\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$2" >>{tmp_path}/calls\n'
        '[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin" && sleep 4\ntrue\n'
    )
    python.chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from ctpo_launchers import LaunchError, environment as e; "
        f"e.REQUIREMENTS, e.FOLDER = Path({str(tmp_path / 'launch.txt')!r}), Path({str(tmp_path / 'venv')!r}); "
        f"sys.executable = {str(python)!r}; e.launch([])"
    )
    called = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, env=called, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=scaled(60))[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    # Made by one; then each goes on as the launcher, which is this interpreter again.
    assert sorted((tmp_path / "calls").read_text().split()) == ["ctpo_launchers.launch"] * 2 + ["pip", "venv"]
    assert sum("waiting for another one" in text for text in said) == 1
