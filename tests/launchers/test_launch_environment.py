"""The launcher's own environment: what is said when it cannot be made. `make test-cluster` makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_launchers import environment
from ctpo_megatron import cli


def test_an_installation_without_a_checkout_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path / "launch.txt")
    assert cli.main(["launch", "my.yaml", "--nodes", "2"]) == 2
    assert "ctpo launch works from a checkout: there is no" in capsys.readouterr().err


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
    with pytest.raises(environment.NoEnvironment, match=r"pip install .* ended with status 9"):
        environment.launch([])
    assert "no such package" in capfd.readouterr().err
    assert not (tmp_path / "venv" / "requirements.sha256").exists()
