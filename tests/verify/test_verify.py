"""`ctpo verify` passes on what is right, and says what is wrong where something is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ctpo_megatron import cli
from ctpo_megatron.objective import PRESETS
from ctpo_megatron.verify import LAYOUTS, Check, batch, layouts_for, run

SMALL = ("one", "one-micro", "tp2-sp", "vpp2-micro", "cp2-micro", "dp2-distopt", "moe-ep2")


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctpo_megatron.cli", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_a_small_matrix_and_every_objective() -> None:
    done = verify("--layouts", *SMALL, "--objective", "all")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    total = len(SMALL) * len(PRESETS)
    assert f"{total} of {total} within 1e-05 of the float64 oracle" in done.stdout


def test_the_matrix_is_large_enough_and_runs_on_two_cores() -> None:
    assert len([layout for layout in LAYOUTS.values() if layout.ranks <= 4]) >= 12


def test_unknown_names_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--layouts", "tp3"]) == 2
    assert "unknown layout tp3; known: one" in capsys.readouterr().err
    assert cli.main(["verify", "--objective", "ppo"]) == 2
    assert "unknown preset ppo" in capsys.readouterr().err


def test_a_layout_of_experts_is_refused_for_a_dense_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch.build_model(tmp_path, experts=False)
    assert cli.main(["verify", "--model", str(tmp_path), "--layouts", "one", "moe-ep2"]) == 2
    assert "moe-ep2 cannot run" in capsys.readouterr().err
    assert not any(name.startswith("moe") for name in layouts_for(tmp_path, 4))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory):
    """A folder in which a job has run the layout `one`, and the oracle."""
    folder = tmp_path_factory.mktemp("verify")
    batch.build_model(folder / "model", experts=False)
    oracle = run._prepare(folder, folder / "model", ["ctpo"])
    assert run._run_job(folder, 1, ["one"]) == ""
    return folder, oracle


def check_after(truth, change) -> Check:
    """The check of what the job wrote, once `change` was made to it."""
    folder, oracle = truth
    found = torch.load(folder / "one.pt", weights_only=False)
    change(found)
    torch.save(found, folder / "changed.pt")
    return run._check(folder, "changed", "ctpo", 1, oracle, "")


def test_an_untouched_result_passes(truth) -> None:
    check = check_after(truth, lambda found: None)
    assert check.passed(1e-5) and check.gradient > 0 and check.logp > 0


def scale_one_tensor(found) -> None:
    found["gradient"]["ctpo"]["model.embed_tokens.weight"] *= 1.001


def move_one_token(found) -> None:
    key = next(iter(found["logp"]))
    found["logp"][key][found["logp"][key].nonzero()[0]] += 1e-4


def change_the_loss(found) -> None:
    found["loss"]["ctpo"] *= 1.0001


def lose_a_sequence(found) -> None:
    found["logp"].popitem()


def lose_a_tensor(found) -> None:
    found["gradient"]["ctpo"].pop("model.norm.weight")


@pytest.mark.parametrize("change", [scale_one_tensor, move_one_token, change_the_loss])
def test_every_planted_difference_fails(truth, change) -> None:
    assert not check_after(truth, change).passed(1e-5)


def test_the_worst_tensor_is_named(truth) -> None:
    assert check_after(truth, scale_one_tensor).worst_name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "problem"), [(lose_a_sequence, "every sequence"), (lose_a_tensor, "model.norm.weight")]
)
def test_what_is_missing_is_named(truth, change, problem: str) -> None:
    assert problem in check_after(truth, change).problem


def test_a_job_that_dies_is_reported(tmp_path: Path) -> None:
    problem = run._run_job(tmp_path, 1, ["one"])
    assert "work.pickle" in problem
