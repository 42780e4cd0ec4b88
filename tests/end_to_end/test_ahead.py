"""Runs whose engines sample while the trainer works: ended, they go on with every prompt accounted for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.data.trajectory_file import read_ahead
from ctpo_megatron.tracking import read_trajectories, trajectory_files
from tests.end_to_end.small_run import Ctpo, records

STEPS = 6
SETTINGS = ("sft=null", "export.enabled=false", "tracking.report=false", "eval.every=2", f"run.steps={STEPS}")


def rollouts_of(checkpoint: Path) -> Any:
    kept = json.loads((checkpoint / "COMPLETE.json").read_text())["run"]["rollouts"]
    return kept | {"ahead": read_ahead(checkpoint)}


def check_accounts(checkpoint: Path) -> int:
    """Every prompt that was consumed is trained on or sampled ahead; how many groups are sampled ahead."""
    state = rollouts_of(checkpoint)
    batches = state["ahead"]["batches"]
    ahead = [group["prompt"] for batch in batches for group in batch["groups"]]
    trained = state["ahead"]["settled"]["trained"]
    assert state["ahead"]["settled"] == {"trained": trained, "dropped": 0, "quarantined": 0}
    assert state["prompts"]["consumed"][trained:] == ahead and not state["quarantined"]
    return len(ahead)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("ended_by", "partial"), [("SIGKILL", "continue"), ("SIGTERM", "continue"), ("SIGKILL", "finish")]
)
def test_a_run_that_samples_ahead_goes_on(tmp_path: Path, ended_by: str, partial: str) -> None:
    ctpo = Ctpo(tmp_path)
    settings = (*SETTINGS, "run.name=ahead", "rollout.max_staleness=1", f"rollout.partial={partial}")
    if ended_by == "SIGKILL":
        output = ctpo.train_until(f"[rl] step 3/{STEPS}", *settings)
    else:
        status, output = ctpo.train_disturbed(
            f"[rl] step 3/{STEPS}", lambda process: os.kill(process, signal.SIGTERM), *settings
        )
        assert status == 128 + signal.SIGTERM, output[-4000:]
    run = tmp_path / "runs" / "ahead"
    newest = max((run / "checkpoints").glob("step_*"))
    assert newest.name in ("step_000002", "step_000003", "step_000004"), output[-4000:]
    assert check_accounts(newest) > 0  # else nothing was under way
    resumed = ctpo.launch(*settings, "run.resume=true")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "continuing after step" in resumed.stdout
    last = run / "checkpoints" / f"step_{STEPS:06d}"
    assert check_accounts(last) == 0
    dumps = [read_trajectories(path) for path in trajectory_files(run).values()]
    prompts = [dump[place]["prompt_id"] for dump in dumps for place in range(0, len(dump), 4)]
    assert prompts == rollouts_of(last)["prompts"]["consumed"] and len(prompts) == 4 * STEPS
    lines = records(run)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert {line["rollout/staleness_max"] for line in lines[1:]} == {0.0, 1.0}  # the first batch after a start has 0
    assert all("val/toolmath/acc/mean@1" in lines[step] for step in range(0, STEPS + 1, 2))
    assert all(line["rollout/continued_tokens"] == 0 for line in lines[1:] if partial == "finish")
    assert all(line.get("mismatch/log_prob_abs_max", 0.0) <= 1e-3 for line in lines[1:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_ranks_train_on_what_rank_zero_has_sampled_ahead(tmp_path: Path) -> None:
    settings = (*SETTINGS, "run.steps=3", "run.name=ranks", "rollout.max_staleness=1", "eval.every=0")
    done = Ctpo(tmp_path).launch(*settings, "policy.tensor_model_parallel_size=2", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = records(tmp_path / "runs" / "ranks")
    assert [line["rollout/staleness_max"] for line in lines[1:]] == [0.0, 1.0, 1.0]
    assert check_accounts(tmp_path / "runs" / "ranks" / "checkpoints" / "step_000003") == 0
