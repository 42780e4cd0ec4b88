"""The runs of a sweep: what each is started with, which SFT and task they share, and every mistake before a start."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron import cli
from ctpo_megatron.config import ConfigError, dump, load_config
from ctpo_megatron.sweep import PlannedRun, Sweep, plan, read_grid
from ctpo_megatron.sweep.plan import SftMode
from tests.preflight.test_sft_source import CONFIG

GRID = ["objective.preset=ctpo,grpo", "run.seed=0,1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctpo_megatron.cli.sweep.has_cuda_device", lambda: False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("my.yaml").write_text(CONFIG.replace("name: a", "name: mine"))
    return tmp_path


def made(*overrides: str, grid: list[str] | None = None, mode: SftMode = "once") -> Sweep:
    return plan("my.yaml", read_grid(GRID if grid is None else grid, overrides), mode)


def problems(*overrides: str, grid: list[str] | None = None, mode: SftMode = "once") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        made(*overrides, grid=grid, mode=mode)
    return [str(problem) for problem in caught.value.problems]


def set_by(run: PlannedRun) -> dict[str, Any]:
    """What a run is started with; the last override of a key wins."""
    return dict(text.split("=", 1) for text in run.overrides)


def test_all_runs_have_the_task_and_the_sft_of_the_configurations_own_seed() -> None:
    sweep = made("run.seed=7", grid=["objective.preset=ctpo,grpo"])
    (sft,) = sweep.sfts.values()
    assert (sft.name, sft.config.run.seed, sft.config.run.steps) == ("sft", 7, 0)
    sweep = made()
    assert [run.name for run in sweep.runs] == ["ctpo-seed0", "ctpo-seed1", "grpo-seed0", "grpo-seed1"]
    assert [run.config.run.seed for run in sweep.runs] == [0, 1, 0, 1]
    for run in sweep.runs:
        given = set_by(run)
        assert given["sft.from"] == '"runs/mine/sft"' and given["run.resume"] == '"auto"'
        assert run.directory == Path("runs/mine", run.name)
        assert run.config.prepare == sweep.sfts["sft"].config.prepare
        assert run.config.data.train == ("runs/mine/sft/task/train.parquet",)
        assert run.config.model.path == "runs/mine/sft/task/model"


def test_each_seed_has_a_task_and_an_sft_of_its_own() -> None:
    sweep = made(mode="each")
    assert [(sft.name, sft.config.run.seed) for sft in sweep.sfts.values()] == [("sft-seed0", 0), ("sft-seed1", 1)]
    for run in sweep.runs:
        assert run.config.prepare is not None and run.config.prepare.seed == run.config.run.seed
        assert run.sft == f"sft-seed{run.config.run.seed}"
        assert run.config.prepare.directory == f"runs/mine/{run.sft}/task"


def test_a_key_that_shapes_sft_has_an_sft_for_each_value() -> None:
    sweep = made(grid=["sft.steps=3,6", "run.seed=0,1"])
    assert {sft.name: sft.config.sft.steps for sft in sweep.sfts.values() if sft.config.sft} == {
        "sft-steps3": 3,
        "sft-steps6": 6,
    }
    assert [run.sft for run in sweep.runs] == ["sft-steps3", "sft-steps3", "sft-steps6", "sft-steps6"]


def test_without_sft_the_runs_share_the_task_alone() -> None:
    sweep = made("sft=null")
    assert sweep.sfts == {} and sweep.mode is None
    assert {run.config.prepare.directory for run in sweep.runs if run.config.prepare} == {"runs/mine/shared/task"}
    assert all("sft.from" not in set_by(run) for run in sweep.runs)


def test_what_a_run_is_started_with_gives_the_configuration_that_was_checked() -> None:
    for run in made().all:
        again = load_config("my.yaml", [text for text in run.overrides if not text.startswith("sft.from=")])
        assert again == run.config


@pytest.mark.parametrize(
    ("grid", "overrides", "expected"),
    [
        (["objective.preset=ctpo,grpi", "run.seed=0,1"], [], "grpi"),
        (["run.seed=0,x"], [], 'command line: run.seed = "x": must be an integer'),
        (["run.sed=0,1"], [], "run.sed = 0: unknown key [sed0]; did you mean run.seed"),
        (["policy.optimizer.lr=1e-6,1.0e-6"], [], "are the same configuration"),
        (GRID, ["run.overwrite=true"], "run.overwrite = true: would delete each run as it is continued"),
    ],
)
def test_a_mistake_in_any_configuration_is_found(grid: list[str], overrides: list[str], expected: str) -> None:
    assert any(expected in problem for problem in problems(*overrides, grid=grid))


def test_a_mistake_says_once_which_runs_have_it() -> None:
    (problem,) = problems(grid=["objective.preset=ctpo,grpi", "run.seed=0,1,2,3,4"])
    assert "[grpi-seed0, grpi-seed1, grpi-seed2 and 2 more]" in problem
    (problem,) = problems("run.stepz=1")
    assert "[" not in problem.split("did you mean")[0]


def test_an_sft_for_each_seed_needs_sft() -> None:
    assert problems("sft=null", mode="each") == [
        '--sft = "each": there is no SFT to do for each seed (sft: null); leave it out'
    ]


def dry_run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(["sweep", "my.yaml", *words, "--dry-run"])
    return status, *capfd.readouterr()


def test_a_dry_run_prints_the_runs_and_starts_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = dry_run(capfd, "--grid", *GRID)
    assert status == 0, err
    assert "4 runs in runs/mine, one after the other" in out
    assert "  sft         new  SFT of seed 0" in out and "  grpo-seed1  new  objective.preset=grpo, run.seed=1" in out
    assert [path.name for path in folder.iterdir()] == ["my.yaml"]


def test_a_dry_run_checks_all_configurations_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    grid = ("--grid", "policy.mini_batch_prompts=3,4,5", "rollout.group_timeout_s=600,700")
    status, _, err = dry_run(capfd, *grid, "eval.every=2")
    assert status == 2
    assert err.count("does not divide the batch") == 2 and err.count("eval.every") == 1
    assert "policy.mini_batch_prompts = 5: does not divide the batch [mini_batch_prompts5-group_timeout_s600, " in err


def begun(sweep: Sweep, name: str, **changes: Any) -> None:
    """A run directory as a run of the sweep leaves it."""
    run = next(run for run in sweep.all if run.name == name)
    tree = run.config.model_dump(mode="json")
    if run.sft is not None:
        tree["sft"]["from"] = str(sweep.sfts[run.sft].directory)
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text(yaml.safe_dump(tree))
    (run.directory / "environment.json").write_text(
        json.dumps({"version": "1", "finished_steps": run.config.run.steps})
    )


def test_a_run_of_other_settings_is_not_taken_for_one_of_this_sweep(capfd: pytest.CaptureFixture[str]) -> None:
    sweep = made()
    for name in ("sft", "ctpo-seed0"):
        begun(sweep, name)
    status, out, err = dry_run(capfd, "--grid", *GRID, "tracking.live=plain", "run.steps=9", "checkpoint.every=2")
    assert (status, err.count("error")) == (0, 0)
    assert "ctpo-seed0  to be continued" in out and re.search("ctpo-seed1 +new", out)  # 4 of 9 steps are done
    status, _, err = dry_run(capfd, "--grid", *GRID, "rollout.temperature=0.5")
    assert status == 2 and "rollout.temperature = 0.5: runs/mine/ctpo-seed0 was begun with 1.0" in err
    assert "runs/mine/sft was" not in err  # which samples nothing
    status, _, err = dry_run(capfd, "--grid", *GRID, "sft.steps=6")
    assert status == 2 and "sft.steps = 6: runs/mine/sft was begun with 5" in err
    status, _, err = dry_run(capfd, "--sft", "each", "--grid", *GRID)
    assert (
        status == 2 and "sft.from = \"runs/mine/sft-seed0\": runs/mine/ctpo-seed0 was begun with 'runs/mine/sft'" in err
    )


@pytest.mark.parametrize(("file", "problem"), [("config.yaml", "is a run"), ("mine.txt", "is no sweep")])
def test_a_folder_of_something_else_is_not_written_to(
    file: str, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine", file).write_text(dump(load_config("my.yaml")))
    status, _, err = dry_run(capfd, "--grid", *GRID)
    assert status == 2 and f"runs/mine {'exists, and ' if file == 'mine.txt' else ''}{problem}" in err
    shutil.rmtree("runs")


def test_a_sweep_is_no_rank(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = dry_run(capfd, "--grid", *GRID)
    assert status == 2 and "start it without torchrun, with --ranks N" in err
