"""`ctpo sweep --tune`: what is refused, which runs tune and are compared, and the pick, with runs that only record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctpo_megatron import cli
from ctpo_megatron.report import RunData, mean_sampled_reward
from tests.test_sweep_command import command, events, files, folder, python_that_runs
from tests.tracking.synthetic_run import write_run

__all__ = ["command", "files", "folder"]

GRID = ("--grid", "objective.preset=ctpo,grpo", "run.seed=0,1")
TUNE = ("--tune", "policy.optimizer.lr=1e-4,3e-4,1e-3", "--tune-seeds", "10,11")
TWO_RATES = ("--tune", "policy.optimizer.lr=1e-4,3e-4")

RUN = """\
# Stands for a run: writes what a run would, with the reward that `rewards.json` has for preset and rate.
import json, shutil, sys
from pathlib import Path

settings = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
with open("events.txt", "a") as file:
    file.write(settings["run.name"] + "\\n")
preset, rate = settings.get("objective.preset", "ctpo"), settings["policy.optimizer.lr"]
rewards = json.loads(Path("rewards.json").read_text())
reward = rewards[preset][rate]
if reward == "fails":
    sys.exit(3)
folder = Path(json.loads(settings["run.root"])) / settings["run.name"]
if not folder.exists():
    shutil.copytree("template", folder)
    config = (folder / "config.yaml").read_text()
    for old, new in (("seed: 0", f"seed: {settings['run.seed']}"), ("preset: ctpo", f"preset: {preset}")):
        assert old in config
        config = config.replace(old, new, 1)
    (folder / "config.yaml").write_text(config.replace("name: demo", f"name: {settings['run.name']}", 1))
    lines = [json.dumps({"step": step, "reward/mean": reward + step / 100}) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\\n".join(lines) + "\\n")
"""
REWARDS = {
    "ctpo": {"1e-4": 0.2, "3e-4": 0.4, "1e-3": 0.3},
    "grpo": {"1e-4": 0.2, "3e-4": 0.4, "1e-3": 0.6},
}


@pytest.fixture
def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `RUN` in place of every training."""
    (folder / "rewards.json").write_text(json.dumps(REWARDS))
    write_run(folder / "made", steps=2).rename(folder / "template")
    monkeypatch.setattr("ctpo_megatron.cli.sweep.sys.executable", str(python_that_runs(RUN)))


def said(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main([*words])
    out, err = capfd.readouterr()
    return status, out, err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tune", "policy.optimizer.lr=1,2"], "--tune: needs seeds of its own"),
        (["--tune-seeds", "10"], "--tune-seeds: tunes nothing alone"),
        (["--tune", "policy.optimizer.lr=1", "--tune-seeds", "10"], "has one value, an empty one, or one twice"),
        (["--tune", "policy.optimizer.lr=1,", "--tune-seeds", "10"], "has one value, an empty one, or one twice"),
        (["--tune", "policy.optimizer.lr=1,2", "--tune-seeds", "10,10"], "has an empty seed, or one twice"),
        (["--tune", "run.seed=1,2", "--tune-seeds", "10"], "run.seed: cannot be tuned"),
        (["--tune", "run.root=a,b", "--tune-seeds", "10"], "run.root: cannot be tuned"),
        (["--tune", "objective.preset=ctpo,grpo", "--tune-seeds", "10"], "objective.preset: is in --grid, too"),
        (["--tune", "data.eval=[],[a]", "--tune-seeds", "10"], "data.eval: is an override, too"),
        ([*TWO_RATES, "--tune-seeds", "10,1"], '--tune-seeds: = "1": these seeds are compared, too'),
        ([*TWO_RATES, "--tune-seeds", "x"], "run.seed = "),
    ],
)
def test_a_bad_tuning_is_named(
    command: list[str], capfd: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    status, _, err = said(capfd, *command, *GRID, *words, "--dry-run")
    assert status == 2 and problem in err, err


def test_seeds_of_the_configuration_are_compared_too(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--grid", "objective.preset=ctpo,grpo", "run.seed=10", *TWO_RATES, "--tune-seeds", "10")
    status, _, err = said(capfd, *command, *words, "--dry-run")
    assert status == 2 and '--tune-seeds: = "10": these seeds are compared, too' in err


def test_a_dry_run_lists_what_tunes(command: list[str], capfd: pytest.CaptureFixture[str], folder: Path) -> None:
    status, out, _ = said(capfd, *command, *GRID, *TUNE, "--dry-run")
    assert status == 0 and out.startswith("12 runs to tune with, in runs/mine/tuning: ctpo-lr1e-4-seed10, ")
    assert "then 4 runs in runs/mine" in out and not list(folder.iterdir())


@pytest.mark.usefixtures("stand_in")
def test_each_point_gets_the_rate_with_the_highest_mean_reward(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(capfd, *command, *GRID, *TUNE)
    assert status == 0, err
    assert events()[:3] == ["ctpo-lr1e-4-seed10", "ctpo-lr1e-4-seed11", "ctpo-lr3e-4-seed10"]
    assert events()[12:] == ["ctpo-lr3e-4-seed0", "ctpo-lr3e-4-seed1", "grpo-lr1e-3-seed0", "grpo-lr1e-3-seed1"]
    assert "[tune] ctpo: policy.optimizer.lr=3e-4 (mean reward: policy.optimizer.lr=1e-4 0.215, " in out
    assert "warning: grpo: policy.optimizer.lr = 0.001: is at the end of 1e-4,3e-4,1e-3" in err
    assert "ctpo: policy.optimizer.lr" not in err
    record = json.loads(Path("runs/mine/tuning.json").read_text())
    assert record["keys"] == ["policy.optimizer.lr"] and record["seeds"] == ["10", "11"]
    assert record["picks"]["grpo"]["values"] == {"policy.optimizer.lr": "1e-3"}
    assert [tried["mean_reward"] for tried in record["picks"]["grpo"]["tried"]] == pytest.approx([0.215, 0.415, 0.615])
    assert "mean reward" in out and "runs/mine/comparison.html" in out


@pytest.mark.usefixtures("stand_in")
def test_a_grid_of_seeds_alone_has_one_pick(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capfd, *command, "--grid", "run.seed=0,1", *TUNE[:2], "--tune-seeds", "10")
    assert status == 0, err
    assert events() == ["lr1e-4-seed10", "lr3e-4-seed10", "lr1e-3-seed10", "lr3e-4-seed0", "lr3e-4-seed1"]
    assert "[tune] policy.optimizer.lr=3e-4 (mean reward" in out


@pytest.mark.usefixtures("stand_in")
def test_nothing_is_picked_where_a_tuning_run_failed(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Else a rate would be left out by chance; the same command tries again."""
    rewards = json.loads(Path("rewards.json").read_text())
    rewards["grpo"]["1e-3"] = "fails"
    Path("rewards.json").write_text(json.dumps(rewards))
    words = (*GRID, *TUNE[:2], "--tune-seeds", "10")
    status, _, err = said(capfd, *command, *words)
    assert status == 1 and len(events()) == 6 and not Path("runs/mine/tuning.json").exists()
    assert "grpo-lr1e-3-seed10 failed with exit status 3" in err and "nothing is picked" in err
    Path("rewards.json").write_text(json.dumps(REWARDS))
    assert said(capfd, *command, *words)[0] == 0 and events()[-1] == "grpo-lr1e-3-seed1"


def test_the_mean_is_over_all_steps(tmp_path: Path) -> None:
    assert mean_sampled_reward(RunData(tmp_path, {}, {}, [], [], {})) is None
    metrics = [
        {"step": 0, "reward/mean": 9.0},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2},
        {"step": 3, "reward/mean": 1},
    ]
    assert mean_sampled_reward(RunData(tmp_path, {}, {}, metrics, [], {})) == 0.75
