"""Jobs that a real Slurm of two nodes runs: the node program on both, preempted by a requeue, and what follows."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import RECORDED
from tests.cluster.local_slurm import Slurm
from tests.end_to_end.small_run import SMALL, Ctpo, records, repeatable
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
CONFIG = str(ROOT / "configs" / "quickstart.yaml")
SCRIPT = ROOT / "tests" / "cluster" / "job.sh"


def submit(
    slurm: Slurm, ctpo: Ctpo, name: str, *overrides: str, options: str = "", small: Sequence[str] = SMALL
) -> tuple[str, Path]:
    """Submit a job of two nodes; its number and its output."""
    output = ctpo.directory / f"{name}.txt"
    slurm.environment |= ctpo.environment | {
        "PYTHON": sys.executable,
        "NODE_OPTIONS": options,
        "TRAINER_WORDS": " ".join([CONFIG, *small, f"run.name={name}", "run.resume=auto", *overrides]),
        "SLURM_CONF": str(slurm.folder / "slurm.conf"),
    }
    return slurm.submit(SCRIPT, f"--chdir={ctpo.directory}", f"--output={output}"), output


def wait_for_lines(
    slurm: Slurm, job: str, file: Path, count: int, output: Path, seconds: float = 200, *, holding: str = ""
) -> None:
    """Wait until a file of a job that runs has so many lines that hold a text."""
    deadline = time.monotonic() + scaled(seconds)
    while not file.exists() or sum(holding in line for line in file.read_text().splitlines()) < count:
        state = slurm.shown(job, "JobState")
        wrong = time.monotonic() > deadline or state not in ("PENDING", "CONFIGURING", "RUNNING")
        assert not wrong, f"{state}: {output.read_text()[-8000:] if output.exists() else 'no output'}"
        time.sleep(0.2)


def test_a_signal_ends_both_nodes_and_the_requeued_job_ends_well(slurm: Slurm, ctpo: Ctpo) -> None:
    """With a payload in place of the trainer: what the scheduler does, in seconds."""
    replay = "rollout.replay=runs/none"
    job, output = submit(slurm, ctpo, "wait", replay, "eval.every=0", options="--module tests.launchers.payload")
    wait_for_lines(slurm, job, output, 2, output, 100, holding="WORLD_SIZE=")  # what each payload says once it runs
    slurm.requeue(job)
    slurm.until(job, "RUNNING", seconds=150)
    text = output.read_text()
    assert [f"rank {rank} saves after SIGTERM" in text for rank in (0, 1)] == [True, True], text
    slurm.ask("scancel", job)
    slurm.until(job, "CANCELLED", seconds=100)


def test_a_requeued_job_of_two_nodes_resumes_bit_for_bit(slurm: Slurm, ctpo: Ctpo, recorded: Path) -> None:
    replay = (*RECORDED, f"rollout.replay={recorded}", "policy.data_parallel_size=2")
    whole = ctpo.launch("run.name=whole", *replay, ranks=2)
    assert whole.returncode == 0, whole.stderr[-4000:]
    job, output = submit(slurm, ctpo, "requeued", *replay)
    run = ctpo.directory / "runs" / "requeued"
    wait_for_lines(slurm, job, run / "metrics.jsonl", 3, output)
    slurm.requeue(job)
    slurm.until(job, "COMPLETED", "FAILED", seconds=400)
    text = output.read_text()
    assert slurm.shown(job, "JobState") == "COMPLETED", text[-8000:]
    assert slurm.shown(job, "Restarts") == "1"
    assert "a checkpoint follows, within" in text
    expected = [repeatable(record) for record in records(ctpo.directory / "runs" / "whole")]
    assert [repeatable(record) for record in records(run)] == expected


@pytest.mark.timeout(1500)
def test_a_requeued_job_with_engines_on_both_nodes_trains_on_every_prompt_once(slurm: Slurm, ctpo: Ctpo) -> None:
    task = task_folder(*SMALL_TASK[:2], "sft_conversations=1600", SMALL_TASK[3])
    live = (*task_files(task), sft_file(task), "rollout.engines=2", "policy.data_parallel_size=2", "run.steps=4")
    job, output = submit(slurm, ctpo, "live", *live, "sft.steps=100", "eval.every=0", "checkpoint.grace_s=60")
    run = ctpo.directory / "runs" / "live"
    wait_for_lines(slurm, job, run / "metrics.jsonl", 3, output, 600)
    slurm.requeue(job)
    slurm.until(job, "COMPLETED", "FAILED", seconds=600)
    text = output.read_text()
    assert slurm.shown(job, "JobState") == "COMPLETED", text[-8000:]
    assert slurm.shown(job, "Restarts") == "1" and "a checkpoint follows, within" in text
    metrics = records(run)
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert max(record["mismatch/log_prob_abs_max"] for record in metrics[1:]) <= 1e-3
    prompts = [
        line["prompt_id"] for step in range(4) for line in records(run, f"trajectories/step_{step + 1:06d}.parquet")
    ]
    assert len(prompts) == 4 * 4 * 4 and len(set(prompts)) == 4 * 4
    for rank in (0, 1):
        logs = ctpo.directory / "runs" / "live.nodes" / f"node{rank}"
        assert {path.name for path in logs.iterdir()} >= {"trainer.log", "ray.log", "sandbox.log"}
