"""The network between two node programs goes, for a while or for good: the faults of docs/cluster.md."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import Cable, missing
from tests.launchers.programs import running
from tests.launchers.test_node import REPLAY, SOON

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
AWAY_S = 5.0
SILENCE_S = 90.0
"""Of `ctpo_launchers.roll_call`: how long the kernel waits for another host."""


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    try:
        yield cable
    finally:
        cable.remove()


def nodes(cable: Cable, count: int) -> dict[str, Any]:
    """Node 1 at the other end of the cable, the others on this host."""
    addresses = {rank: cable.there if rank == 1 else cable.here for rank in range(count)}
    return {"addresses": addresses, "before": {1: ["ip", "netns", "exec", cable.namespace]}, "options": SOON}


def test_a_job_starts_though_the_network_was_gone_during_the_roll_call(tmp_path: Path, cable: Cable) -> None:
    with running(tmp_path, "run.name=done", *REPLAY, **nodes(cable, 3)) as job:
        job.until("node 1 (rank 1) has reported")
        cable.unplug()
        job.start(2)
        job.until("node 2 (rank 2) has reported")
        time.sleep(AWAY_S)
        assert all(process.poll() is None for process in job.processes.values())
        cable.plug_in()
        began = time.monotonic()
        assert job.statuses() == {0: 0, 1: 0, 2: 0}
        print(f"network back after {AWAY_S:g} s of the roll call: trained {time.monotonic() - began:.1f} s later")
        assert job.survivors() == []


def test_a_node_that_is_cut_off_for_good_ends_a_job_that_trains_and_one_that_starts(
    tmp_path: Path, cable: Cable
) -> None:
    """Nobody is told: no connection is broken. Node 2 of the second job never comes."""
    with ExitStack() as stack:
        for name in ("trains", "starts"):
            (tmp_path / name).mkdir()
        trains = stack.enter_context(running(tmp_path / "trains", "run.name=wait", *REPLAY, **nodes(cable, 2)))
        starts = stack.enter_context(running(tmp_path / "starts", "run.name=wait", *REPLAY, **nodes(cable, 3)))
        starts.until("node 1 (rank 1) has reported")
        for rank in (0, 1):
            trains.until(f"rank {rank}:", rank)
        cable.unplug()
        began = time.monotonic()
        assert trains.statuses(2 * SILENCE_S) == {0: 4, 1: 4}
        print(f"node cut off while training: all over {time.monotonic() - began:.1f} s later")
        assert starts.statuses(SILENCE_S) == {0: 3, 1: 3}
        print(f"node cut off during the roll call: all over {time.monotonic() - began:.1f} s later")
        assert "node 1 (rank 1) is lost" in trains.output(0) and f"node 0 ({cable.here}) is lost" in trains.output(1)
        assert [f"rank {rank} saves after SIGTERM" in trains.output(rank) for rank in (0, 1)] == [True, True]
        assert "node 1 (rank 1) is lost" in starts.output(0)
        assert "the head has stopped: its node program is gone" in starts.output(1)
        assert trains.survivors() == starts.survivors() == []
