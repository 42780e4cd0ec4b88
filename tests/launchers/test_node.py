"""The node program, two of them on this host: what they start, what each end looks like, and that nothing stays."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from ctpo_launchers import node
from tests.launchers.programs import running

REPLAY = ("rollout.replay=runs/recorded", "eval.every=0")
"""No engines: neither Ray nor a sandbox is needed."""
SOON = ("--after-loss", "3")


def test_a_signal_is_passed_to_the_ranks_once_and_their_status_is_that_of_the_nodes(tmp_path: Path) -> None:
    with running(tmp_path, "run.name=wait", *REPLAY, options=SOON) as job:
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
    with running(tmp_path, "run.name=done", *REPLAY, ranks=[0], options=("--start-timeout", "1")) as job:
        assert job.statuses() == {0: 3}
        assert "nothing has been heard from node 1 (rank 1) at 127.0.0.2 port" in job.output(0)
        assert "firewall" in job.output(0)


def test_a_head_that_does_not_answer_is_named(tmp_path: Path) -> None:
    token = tmp_path / "secret"
    token.touch(0o600)
    token.write_text("of this job")
    options = ("--start-timeout", "1", "--token-file", str(token))
    with running(tmp_path, "run.name=done", *REPLAY, ranks=[1], options=options) as job:
        assert job.statuses() == {1: 3}
        assert "the head at 127.0.0.2 port" in job.output(1) and "did not answer within 1 s" in job.output(1)


def test_a_port_that_another_program_has_is_said_before_ray_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = str(other.getsockname()[1])
        with running(tmp_path, "run.name=done", ranks=[0], options=("--port", port)) as job:
            assert job.statuses() == {0: 3}
            assert f"port {port} at 127.0.0.2 is taken by another program: give another --port" in job.output(0)
            assert "Traceback" not in job.output(0) and not (tmp_path / "node0" / "ray.log").exists()


def test_a_job_without_a_secret_does_not_start(tmp_path: Path) -> None:
    (file := tmp_path / "secret").touch(0o600)
    with running(tmp_path, "run.name=done", *REPLAY, ranks=[0], options=("--token-file", str(file))) as job:
        assert job.statuses() == {0: 3}
        assert "is empty: write a secret into it" in job.output(0) and "Traceback" not in job.output(0)


@pytest.mark.parametrize(
    "option", ["--nodes=0", "--nproc-per-node=-1", "--start-timeout=nan", "--after-loss=0", "--start-timeout=inf"]
)
def test_a_number_that_cannot_be_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        node.main([option, "--", "configs/quickstart.yaml"])
    name, _, value = option.partition("=")
    assert ended.value.code == 2
    assert f"argument {name}: {value} is not a positive" in capsys.readouterr().err


def test_logs_that_cannot_be_written_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with running(tmp_path, "run.name=done", ranks=[0], options=("--directory", str(tmp_path / "file"))) as job:
        assert job.statuses() == {0: 2}
        assert f"Not a directory: '{tmp_path}/file" in job.output(0) and "Traceback" not in job.output(0)


def test_a_wrong_request_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with running(tmp_path, "run.nonsense=1", ranks=[0]) as job:
        assert job.statuses() == {0: 2}
        assert "run.nonsense" in job.output(0)
