"""A finished run is extended, exported and evaluated, with real engines: the run of all steps, and its newest model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compare_runs import compare
from tests.end_to_end.small_run import TASK, Ctpo
from tests.support import children

FIRST, LONGER = 5, 10
SETTINGS = (
    "sft=null",
    "objective.entropy_coef=0.01",  # a gradient without a reward
    "data.eval=[]",
    "eval.every=0",
    "tracking.dump_every=5",
    "tracking.trackers=[]",
    "tracking.report=false",
)
EXTEND = (f"run.steps={LONGER}", "run.resume=true")
ROWS = {  # checkpoint.every -> what is typed after `ctpo train` of five steps, and the model that is evaluated
    0: (["extend", "eval"], "model"),
    2: (["export --step 4", "extend", "eval"], "model"),
    3: (["export", "extend export.enabled=false", "export", "eval"], "model-step_000010"),
    5: (["extend export.enabled=false", "export --check", "export --step 5", "eval"], "model-step_000010"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Ctpo:
    """With the run of all steps."""
    ctpo = Ctpo(tmp_path_factory.mktemp("extended"))
    done = ctpo.launch(*SETTINGS, "run.name=longer", f"run.steps={LONGER}")
    assert done.returncode == 0, done.stderr[-4000:]
    return ctpo


def verb(ctpo: Ctpo, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ctpo_megatron.cli", *arguments]
    return children.run(command, directory=ctpo.directory, environment=ctpo.environment, deadline_s=280)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("every", ROWS)
def test_an_extended_run_is_the_longer_run_and_its_newest_model_is_evaluated(folder: Ctpo, every: int) -> None:
    typed, judged = ROWS[every]
    name = f"every_{every}"
    settings = (*SETTINGS, f"run.name={name}", f"checkpoint.every={every}")
    run, longer = folder.directory / "runs" / name, folder.directory / "runs" / "longer"
    held_out = str(TASK / "heldout.parquet")
    done = folder.launch(*settings, f"run.steps={FIRST}")
    assert done.returncode == 0, done.stderr[-4000:]
    for line in typed:
        kind, *options = line.split()
        if kind == "extend":
            done = folder.launch(*settings, *EXTEND, *options)
            assert "a finished run of 5 steps is extended to 10, as a run of 10 steps" in done.stdout
        elif kind == "export":
            done = verb(folder, "export", f"runs/{name}", *options)
        else:
            done = verb(folder, "eval", f"runs/{name}", "--data", held_out)
            assert f"evaluating runs/{name}/{judged} (step {LONGER}, " in done.stdout
        assert done.returncode == 0, line + done.stderr[-4000:]
    status, lines = compare(longer, run, ("trajectories", "metrics", "positions"))
    assert status == 0, lines
    assert (run / judged / "model.safetensors").read_bytes() == (longer / "model" / "model.safetensors").read_bytes()
    assert not [*run.rglob("discarded_*")]
    results = folder.directory / "evaluations" / f"{name}-step_{LONGER:06d}-heldout" / "results.json"
    assert json.loads(results.read_text())["model"] == f"runs/{name}/{judged}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_evaluation_stops_where_a_checkpoint_is_newer(folder: Ctpo) -> None:
    run = folder.directory / "runs" / "longer"
    shutil.move(run / "model", aside := Path(f"{run}-model"))
    try:
        assert verb(folder, "export", "runs/longer", "--step", "9").returncode == 0
        stopped = verb(folder, "eval", "runs/longer", "--data", str(TASK / "heldout.parquet"))
        assert stopped.returncode == 2 and "type `ctpo export runs/longer`" in stopped.stderr
    finally:
        shutil.move(aside, run / "model")
