"""Weights & Biases and MLflow as they are: offline, and into an SQLite store."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.tracking import MetricsWriter, open_trackers, read_metrics, tracker_problem
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
CANARY = "0815canary" * 4  # as long as a W&B key


def run_twice(run_dir, config):
    """Steps 1 and 2 of a run, which is then resumed after step 1."""
    run_dir.mkdir()
    identities = []
    for resumed, steps in ((False, (1, 2)), (True, (2, 3))):
        with open_trackers(config, run_dir) as trackers, MetricsWriter(run_dir, trackers) as writer:
            if resumed:
                writer.truncate_after(1)
            for step in steps:
                writer.log(step, {"val/a/acc/mean@1": step / 4 + resumed, "a/nan": float("nan")})
        (path,) = (run_dir / "trackers").iterdir()
        identities.append(json.loads(path.read_text())["identity"])
    assert not any("tracking/failures" in record for record in read_metrics(run_dir))
    return identities


@pytest.fixture(scope="session")
def trackers_python(tmp_path_factory):
    """An environment from requirements/trackers.txt; CTPO_TRACKERS_PYTHON names one that is there already."""
    if ready := os.environ.get("CTPO_TRACKERS_PYTHON"):
        return ready
    folder = tmp_path_factory.mktemp("trackers")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=scaled(120))
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", ROOT / "requirements" / "trackers.txt"]
    subprocess.run(install, check=True, timeout=scaled(900))
    return str(python)


def offline_run(tmp_path, config_in, caplog, monkeypatch, python=None):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    wandb = {"name": "wandb", "arguments": {"mode": "offline", "project": "tried"}}
    assert tracker_problem(Extension.model_validate(wandb), python) is None
    config = config_in(tracking={"trackers": [wandb], "python": python})
    first, second = run_twice(tmp_path / "demo", config)
    assert first == second
    folders = sorted(path.name for path in (tmp_path / "demo" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(name.endswith(first) for name in folders)
    for name in folders:
        assert (tmp_path / "demo" / "wandb" / name / f"run-{first}.wandb").stat().st_size > 0
    assert not caplog.records
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


def test_weights_and_biases_offline(tmp_path, config_in, caplog, monkeypatch):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed (setup.py, extra wandb)")
    offline_run(tmp_path, config_in, caplog, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_weights_and_biases_in_an_environment_of_its_own(tmp_path, config_in, caplog, monkeypatch, trackers_python):
    offline_run(tmp_path, config_in, caplog, monkeypatch, trackers_python)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mlflow_in_an_environment_of_its_own(tmp_path, config_in, caplog, trackers_python):
    mlflow = {"name": "mlflow", "arguments": {"experiment": "tried"}}
    config = config_in(tracking={"trackers": [mlflow], "python": trackers_python})
    first, second = run_twice(tmp_path / "demo", config)
    assert first == second
    assert not caplog.records
    store = sqlite3.connect(tmp_path / "mlflow.db")
    rows = store.execute("select key, value, step, is_nan from metrics order by key, step, value").fetchall()
    assert [row[:3] for row in rows if not row[3]] == [
        ("val/a/acc/mean_1", 0.25, 1), ("val/a/acc/mean_1", 0.5, 2), ("val/a/acc/mean_1", 1.5, 2),
        ("val/a/acc/mean_1", 1.75, 3),
    ]  # fmt: skip
    assert [row[:1] + row[2:3] for row in rows if row[3]] == [("a/nan", step) for step in (1, 2, 2, 3)]
    assert store.execute("select run_uuid, name, status from runs").fetchall() == [(first, "demo", "FINISHED")]
    parameters = dict(store.execute("select key, value from params").fetchall())
    assert parameters["rollout.samples_per_prompt"] == "8"
