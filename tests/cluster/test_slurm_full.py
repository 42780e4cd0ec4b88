"""The whole quickstart on two nodes of a real Slurm; seven minutes on two cores, so `make test-slow` runs it."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from tests.cluster.local_slurm import local_slurm
from tests.cluster.packages import COMMAND, missing
from tests.cluster.test_slurm import submit
from tests.end_to_end.small_run import Ctpo, records


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(bool(missing()), reason=COMMAND)
@pytest.mark.skipif(os.geteuid() != 0, reason="daemons of Slurm need root")
def test_the_quickstart_learns_on_two_nodes(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    live = ("tracking.live=plain", "rollout.engines=2", "policy.data_parallel_size=2")
    with local_slurm() as slurm:
        job, output = submit(slurm, ctpo, "full", *live, small=())
        slurm.until(job, "COMPLETED", "FAILED", seconds=2000)
        assert slurm.shown(job, "JobState") == "COMPLETED", output.read_text()[-8000:]
    metrics = records(tmp_path / "runs" / "full")
    rewards = [record["reward/mean"] for record in metrics[1:]]
    assert statistics.fmean(rewards[-5:]) >= rewards[0] + 0.30
    assert metrics[-1]["val/toolmath/acc/mean@1"] >= metrics[0]["val/toolmath/acc/mean@1"] + 0.30
    assert max(record["mismatch/log_prob_abs_max"] for record in metrics[1:]) <= 1e-3
