"""The node program, two of them on this host: what they start, what each end looks like, and that nothing stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.launchers.programs import running

REPLAY = "rollout.replay=runs/recorded"
"""No engines: neither Ray nor a sandbox is needed."""
SOON = ("--after-loss", "3")


def test_a_signal_is_passed_to_the_ranks_once_and_their_status_is_that_of_the_nodes(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=wait", REPLAY, options=SOON) as job:
        for rank in (0, 1):
            job.until(f"rank {rank}: WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.2 GLOO_SOCKET_IFNAME=lo", rank)
        for rank in (0, 1):
            job.processes[rank].send_signal(signal.SIGUSR1)
        assert job.statuses() == {0: 143, 1: 143}
        assert [f"rank {rank} saves after SIGUSR1" in job.output(rank) for rank in (0, 1)] == [True, True]
        assert "cluster.nodes=2 cluster.node_address=127.0.0.2" in (tmp_path / "node1" / "trainer.log").read_text()
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        assert job.survivors() == []


def test_a_node_that_does_not_come_is_named_with_what_to_look_at(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=done", REPLAY, ranks=[0], options=("--start-timeout", "1")) as job:
        assert job.statuses() == {0: 3}
        assert "nothing has been heard from node 1 (rank 1) at 127.0.0.2 port" in job.output(0)
        assert "firewall" in job.output(0)


def test_a_head_that_does_not_answer_is_named(tmp_path: Path) -> None:
    token = tmp_path / "secret"
    token.touch(0o600)
    options = ("--start-timeout", "1", "--token-file", str(token))
    with running(tmp_path, "run.name=done", REPLAY, ranks=[1], options=options) as job:
        assert job.statuses() == {1: 3}
        assert "the head at 127.0.0.2 port" in job.output(1) and "did not answer within 1 s" in job.output(1)


def test_a_wrong_request_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with running(tmp_path, "run.nonsense=1", ranks=[0]) as job:
        assert job.statuses() == {0: 2}
        assert "run.nonsense" in job.output(0)


@pytest.mark.slow
def test_nodes_end_when_the_trainer_has_ended(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=done", REPLAY) as job:
        assert job.statuses() == {0: 0, 1: 0}


@pytest.mark.slow
@pytest.mark.parametrize(("failed", "statuses"), [(0, {0: 7, 1: 4}), (1, {0: 7, 1: 7})])
def test_a_rank_that_fails_ends_the_job_with_its_status(tmp_path: Path, failed: int, statuses: dict[int, int]) -> None:
    with running(tmp_path, f"run.name=fail{failed}", REPLAY, options=SOON) as job:
        assert job.statuses() == statuses
        assert f"the trainer of node {failed}" in job.output(1 - failed)
        assert "has ended with status 7" in job.output(1 - failed)
        assert job.survivors() == []


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "left"), [(0, 1), (1, 0)])
def test_a_node_program_that_is_killed_takes_its_ranks_along_and_the_other_node_ends(
    tmp_path: Path, killed: int, left: int
) -> None:
    with running(tmp_path, "run.name=wait", REPLAY, options=SOON) as job:
        job.until("rank 0:", 0)
        job.until("rank 1:", 1)
        job.processes[killed].kill()
        assert job.statuses() == {killed: -9, left: 4}
        assert f"node {killed}" in job.output(left) and "is lost" in job.output(left)
        assert f"rank {left} saves after SIGTERM" in job.output(left)
        assert job.survivors() == []


@pytest.mark.slow
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
