"""The quickstart as a user runs it: it learns, for every seed that we promise."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo, records
from tests.support import children
from tests.support.prefork import ROOT

FIRST_RATIO = "pg_update/first_log_ratio_abs_max"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("seed", "overrides"), [(0, []), (1, []), (2, []), (0, ["rollout.tool_parser=fenced"])])
def test_quickstart_learns(tmp_path: Path, seed: int, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "ctpo_megatron.train", str(ROOT / "configs" / "quickstart.yaml")]
    command += [f"run.seed={seed}", "tracking.live=plain", *overrides]
    done = children.run(command, directory=tmp_path, environment=Ctpo(tmp_path).environment, deadline_s=1400)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = records(tmp_path / "runs" / "quickstart")
    rewards = [record["reward/mean"] for record in metrics[1:]]
    accuracy = [record["val/toolmath/acc/mean@1"] for record in (metrics[0], metrics[-1])]
    assert rewards[0] <= 0.45
    assert statistics.fmean(rewards[-5:]) >= rewards[0] + 0.30
    assert accuracy[1] > accuracy[0]
    assert max(record["mismatch/log_prob_abs_max"] for record in metrics[1:]) <= 1e-3
    # A first optimizer step whose groups are all uniform has no ratio.
    ratios = [record[FIRST_RATIO] for record in metrics[1:] if FIRST_RATIO in record]
    assert len(ratios) >= len(metrics) / 2 and max(ratios) <= 1e-5
