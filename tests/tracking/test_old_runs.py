"""A run of version 0.1 (an excerpt of a quickstart): its report is whole, and resuming it is one clear refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ctpo_megatron import __version__
from ctpo_megatron.run.directory import RunDirectoryError, open_run_directory
from ctpo_megatron.tracking import (
    read_metrics,
    read_trajectories,
    summarize,
    trajectory_files,
    trajectory_of,
    write_report,
)
from ctpo_megatron.tracking.panels import panels
from ctpo_megatron.tracking.report import checks, headline, tiles
from ctpo_megatron.tracking.run_data import RunData

RECORDED = Path(__file__).parent / "version_0_1_run"
EXPECTED = json.loads((RECORDED / "as_version_0_1_read_it.json").read_text())
ADDED = ("time/wait_rollout",)
RENAMED_PANELS = {"warmup": "sft", "warmup_throughput": "sft_throughput"}


@pytest.fixture(scope="module")
def run() -> RunData:
    return RunData.load(RECORDED)


def test_every_curve_has_the_same_points(run):
    drawn = {panel.name: panel for panel in panels(run)}
    for name, curves in EXPECTED["curves"].items():
        lines = drawn[RENAMED_PANELS.get(name, name)].lines
        found = [line.series(run) for line in lines if line.metric not in ADDED]
        assert [series and [series.steps, series.values] for series in found] == curves, name


def test_numbers_of_the_report_are_the_same(run):
    summary = summarize(run)
    assert headline(summary) == EXPECTED["headline"]
    found = [[tile.value, tile.before] for tile in tiles(run, summary)]
    assert found[:-1] == EXPECTED["tiles"][:-1]
    assert found[-1] == ["1.2 GiB", ""], "version 0.1 wrote 1.29BB"
    found = [[check.value, check.good] for check in checks(run)]
    learning = found[: -len(EXPECTED["checks"])]  # rows that version 0.1 did not have
    assert found[len(learning) :] == EXPECTED["checks"]
    assert learning == [["0 of 4", True], ["0 of 4", True], ["10%", True], ["2%", True], ["2%", True]]
    stages = {RENAMED_PANELS.get(name, name): wall for name, wall in EXPECTED["stages"].items()}
    assert {name: spent.wall for name, spent in summary.stages.items()} == stages
    assert set(summary.phases) >= {"rollout", "old_log_probs", "update", "publish"}


def test_the_page_has_all_figures_and_the_trajectories(tmp_path):
    run_dir = tmp_path / "old"
    shutil.copytree(RECORDED, run_dir)
    page = write_report(run_dir).read_text(encoding="utf-8")
    for name in EXPECTED["curves"]:
        assert f'id="figure-{RENAMED_PANELS.get(name, name)}"' in page, name
    assert "Left out" not in page
    assert page.count('data-source="training"') >= 2 and 'data-source="evaluation"' in page
    assert 'data-t="probability' in page and "log ratio" in page and "±" in page


def test_no_old_name_is_left(run):
    names = {name for record in (*read_metrics(RECORDED), *read_metrics(RECORDED, "sft.jsonl")) for name in record}
    assert not [
        name for name in names if any(word in name for word in ("warmup", "anchor", "logp_", "observe", "trace"))
    ]
    assert "tokens/model" in names and "sft/loss" in names


def test_a_recording_can_be_trained_on(run):
    best, worst = map(trajectory_of, read_trajectories(trajectory_files(RECORDED)[1]))
    assert (best.reward, worst.reward) == (1.0, 0.0)
    assert len(best.response_mask) == len(best.rollout_log_probs) == len(best)
    assert sum(best.response_mask) and all(
        p < 0 for p, m in zip(best.rollout_log_probs, best.response_mask, strict=True) if m
    )


def test_resuming_it_is_refused_with_both_versions(tmp_path, config_in):
    config = config_in(run={"resume": True})
    shutil.copytree(RECORDED, config.run.directory)
    before = {path: path.read_bytes() for path in config.run.directory.rglob("*") if path.is_file()}
    with pytest.raises(RunDirectoryError, match=rf"written by ctpo-megatron 0\.1\.0; version {__version__} has other"):
        open_run_directory(config)
    assert {path: path.read_bytes() for path in config.run.directory.rglob("*") if path.is_file()} == before


def test_a_run_of_this_version_says_so(config_in):
    directory = open_run_directory(config_in())
    assert json.loads((directory / "environment.json").read_text())["version"] == __version__
