"""A run over two files by weight is the same run after a kill, bit for bit, also while it samples ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare_runs import repeatable
from tests.end_to_end.small_run import Ctpo, records

SETTINGS = ("sft=null", "export.enabled=false", "tracking.report=false", "eval.every=0", "run.steps=4")
TASK = "runs/prepared/task"
MIX = (
    "prepare.directory=runs/prepared",
    f"data.train=[{{path: {TASK}/train.parquet, weight: 1}}, {{path: {TASK}/heldout.parquet, weight: 3}}]",
)


def drawn(run: Path) -> list[str]:
    steps = sorted((run / "trajectories").glob("*"))
    return [line["prompt_id"] for step in steps for line in records(run, f"trajectories/{step.name}")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mix_goes_on_after_a_kill(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    whole = ctpo.launch(*SETTINGS, *MIX, "run.name=whole")
    assert whole.returncode == 0, whole.stderr[-4000:]
    ctpo.train_until("[rl] step 3/4", *SETTINGS, *MIX, "run.name=killed")
    resumed = ctpo.launch(*SETTINGS, *MIX, "run.name=killed", "run.resume=true")
    assert resumed.returncode == 0 and "continuing after step" in resumed.stdout, resumed.stderr[-4000:]
    first, second = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert drawn(first) == drawn(second)
    assert [repeatable(line) for line in records(first)] == [repeatable(line) for line in records(second)]
    last = records(first)[-1]
    assert sum(value for name, value in last.items() if name.startswith("data/drawn/")) == 16
    other = (*SETTINGS, MIX[0], MIX[1].replace("weight: 3", "weight: 4"), "run.name=killed", "run.resume=true")
    other = ctpo.launch(*other, "run.steps=5")
    assert other.returncode != 0 and "begun with the weights [1.0, 3.0]" in other.stdout + other.stderr
