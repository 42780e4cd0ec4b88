"""What kills parts of a job of two node programs, and what becomes of it: the faults of docs/cluster.md."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launchers.programs import running
from tests.launchers.test_node import REPLAY, SOON

pytestmark = pytest.mark.cluster


def test_nodes_end_when_the_trainer_has_ended(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=done", *REPLAY) as job:
        assert job.statuses() == {0: 0, 1: 0}


@pytest.mark.parametrize(("failed", "statuses"), [(0, {0: 7, 1: 4}), (1, {0: 7, 1: 7})])
def test_a_rank_that_fails_ends_the_job_with_its_status(tmp_path: Path, failed: int, statuses: dict[int, int]) -> None:
    with running(tmp_path, f"run.name=fail{failed}", *REPLAY, options=SOON) as job:
        assert job.statuses() == statuses
        assert f"the trainer of node {failed}" in job.output(1 - failed)
        assert "has ended with status 7" in job.output(1 - failed)
        assert job.survivors() == []


def test_a_rank_that_is_killed_ends_the_job_with_137(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=wait", *REPLAY, options=SOON) as job:
        job.until("rank 0:", 0)
        job.until("rank 1:", 1)
        (rank,) = job.children("-u -m tests.launchers.payload", 1)
        rank.kill()
        assert job.statuses() == {0: 137, 1: 137}
        assert "rank 0 of this node ended with status -9" in job.output(1)
        assert job.survivors() == []


@pytest.mark.parametrize(("killed", "left"), [(0, 1), (1, 0)])
def test_a_node_program_that_is_killed_takes_its_ranks_along_and_the_other_node_ends(
    tmp_path: Path, killed: int, left: int
) -> None:
    with running(tmp_path, "run.name=wait", *REPLAY, options=SOON) as job:
        job.until("rank 0:", 0)
        job.until("rank 1:", 1)
        job.processes[killed].kill()
        assert job.statuses() == {killed: -9, left: 4}
        assert f"node {killed}" in job.output(left) and "is lost" in job.output(left)
        assert f"rank {left} saves after SIGTERM" in job.output(left)
        assert job.survivors() == []


def test_ray_and_the_sandbox_are_started_again_and_the_end_of_rays_head_ends_the_job(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=wait", "rollout.engines=2", "sandbox.require=none", options=SOON) as job:
        job.until("rank 0:", 0)
        job.until("RAY_ADDRESS=127.0.0.2", 1)
        for rank, word in ((1, "raylet/raylet "), (0, "ctpo_sandbox.server")):
            os.kill(job.children(word, rank)[0].pid, signal.SIGKILL)
        job.until("Ray has ended on this node", 1)
        job.until("the sandbox server ended with status -9; starting it again on port", 0)
        job.until("Ray is up again", 1)
        job.until_runs("ctpo_sandbox.server", 2)
        job.until("rank 0:", 0)
        os.kill(job.children("gcs/gcs_server")[0].pid, signal.SIGKILL)
        assert job.statuses() == {0: 4, 1: 4}
        assert "Ray's head has ended" in job.output(0) and "Ray's head has ended" in job.output(1)
        assert job.survivors() == []
