"""Weights & Biases and MLflow as they are: offline, and into an SQLite store."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import time
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
        assert trackers.take_failures() == 0
        (path,) = (run_dir / "trackers").iterdir()
        identities.append(json.loads(path.read_text())["identity"])
    assert not any("tracking/failures" in record for record in read_metrics(run_dir))
    return identities


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (setup.py, extra {package})")


def test_weights_and_biases_offline(tmp_path, config_in, caplog, monkeypatch):
    needs("wandb")
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    wandb = {"name": "wandb", "arguments": {"mode": "offline", "project": "tried"}}
    assert tracker_problem(Extension.model_validate(wandb)) is None
    first, second = run_twice(tmp_path / "demo", config_in(tracking={"trackers": [wandb]}))
    assert first == second
    folders = sorted(path.name for path in (tmp_path / "demo" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2 and all(name.endswith(first) for name in folders)
    for name in folders:
        assert (tmp_path / "demo" / "wandb" / name / f"run-{first}.wandb").stat().st_size > 0
    assert not [record for record in caplog.records if record.name.startswith("ctpo_megatron")]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


UNREACHABLE = """
import sys
from pathlib import Path
from ctpo_megatron.tracking import open_trackers
from tests.tracking.synthetic_run import make_config

folder = Path(sys.argv[1])
config = make_config(folder, tracking={"trackers": ["wandb"], "timeout_s": 3})
with open_trackers(config, folder) as trackers:
    trackers.log(1, {"reward/mean": 0.5})
print("failures:", trackers.take_failures())
"""


def test_a_server_that_never_answers_keeps_no_process_alive(tmp_path):
    """W&B's library waits for its uploads when the interpreter exits; that must not hold the nodes of a job."""
    needs("wandb")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = os.environ | {"WANDB_API_KEY": CANARY, "WANDB_BASE_URL": url}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", UNREACHABLE, tmp_path],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(120),
        )  # fmt: skip
    assert done.returncode == 0 and "failures: 1" in done.stdout, done.stderr
    assert "did not finish within 3 s" in done.stderr
    assert time.monotonic() - began < scaled(30)


def test_mlflow_in_an_sqlite_store(tmp_path, config_in, caplog):
    needs("mlflow")
    mlflow = {"name": "mlflow", "arguments": {"experiment": "tried"}}
    assert tracker_problem(Extension.model_validate(mlflow)) is None
    first, second = run_twice(tmp_path / "demo", config_in(tracking={"trackers": [mlflow]}))
    assert first == second
    assert not [record for record in caplog.records if record.name.startswith("ctpo_megatron")]
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


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_mlflow_shares_the_environment_of_the_locks(tmp_path):
    """The extra `mlflow` is installed before the packages that run this test, and has to keep their versions."""
    wanted = [text for text in importlib.metadata.requires("ctpo-megatron") or [] if 'extra == "mlflow"' in text]
    names = [re.split(r"\s*;", text)[0] for text in wanted]
    assert any(name.startswith("mlflow") for name in names)
    here = {package.name: package.version for package in importlib.metadata.distributions()}
    kept = [f"{name}=={version}\n" for name, version in here.items() if not name.startswith("ctpo")]
    (tmp_path / "kept.txt").write_text("".join(kept))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=scaled(120))
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    uv = [Path(sys.executable).parent / "uv", "pip", "install", "--quiet", "--python", python]
    subprocess.run([*uv, "--constraint", tmp_path / "kept.txt", *names], check=True, timeout=scaled(300))
    test = f"{Path(__file__)}::{test_mlflow_in_an_sqlite_store.__name__}"
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT, capture_output=True, text=True, timeout=scaled(300),
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
