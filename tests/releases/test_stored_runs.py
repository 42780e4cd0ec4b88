"""Runs that each release has left: they are small, whole and readable; this version continues them."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from ctpo_megatron import __version__
from ctpo_megatron.policy.checkpoint_files import complete, digests, read_checkpoint_marker
from ctpo_megatron.tracking import (
    PositionsWriter,
    read_heads,
    read_positions,
    read_texts,
    read_trajectories,
    recorded_trajectories,
    trajectory_files,
)
from tests.releases.make import FOLDER, LARGEST, NAME, train
from tests.report.test_paper_figures import drawn
from tests.support.deadlines import scaled

ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))
each_release = pytest.mark.parametrize("archive", ARCHIVES, ids=[path.name for path in ARCHIVES])


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "runs" / NAME


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_this_release_has_a_run() -> None:
    assert f"{__version__}.tar.xz" in [path.name for path in ARCHIVES]


@each_release
def test_a_stored_run_is_small_and_whole(archive: Path, tmp_path: Path) -> None:
    assert archive.stat().st_size <= LARGEST
    run = unpacked(archive, tmp_path)
    assert yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["run"]["root"] == "runs"
    assert steps(run)[-1] == 2
    (checkpoint,) = complete(run / "checkpoints")
    marker = read_checkpoint_marker(checkpoint)
    assert (marker.step, digests(checkpoint, marker.files)) == (2, marker.files)
    dumps = trajectory_files(run)
    assert [*dumps] == [1, 2]
    for dump in dumps.values():
        records = read_trajectories(dump)
        assert [head.prompt_id for head in read_heads(dump)] == [record["prompt_id"] for record in records] != []
        assert len([*read_texts(dump)]) == len([*read_heads(dump)]) == len(records)
        assert [trajectory.reward for trajectory in recorded_trajectories(dump)] == [
            record["reward"] for record in records
        ]


BASE_INSTALL = """
import sys
sys.modules |= dict.fromkeys(("torch", "megatron", "ray", "vllm", "transformers", "safetensors", "ctpo_kernels"))
from ctpo_megatron.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""`ctpo` without what trains: what is None there cannot be imported."""


@each_release
def test_it_is_reported_and_compared_without_torch(archive: Path, tmp_path: Path) -> None:
    """As on a login node: rows of positions, too, of which there are enough for a fit."""
    run = unpacked(archive, tmp_path)
    assert len([*read_positions(run, "last")]) == 2
    PositionsWriter(run).log(2, {"last": drawn()[0].record()})
    for words in (("report", run), ("compare", run, run, "--out", run / "both.html")):
        command = [sys.executable, "-c", BASE_INSTALL, *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(100))
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "std(S_t) grows like sqrt(t)" in (run / "report.html").read_text(encoding="utf-8")
    assert "Effective sample size by position" in (run / "both.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1300)
@each_release
def test_this_version_continues_it(archive: Path, tmp_path: Path) -> None:
    run = unpacked(archive, tmp_path)
    done = train(tmp_path, "runs/stored/config.yaml", "run.resume=true", "run.steps=3")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert steps(run)[-1] == 3
    assert "continuing after step 2" in done.stdout + done.stderr
