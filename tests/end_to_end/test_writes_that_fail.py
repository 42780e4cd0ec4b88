"""A run whose disk is full for a while continues and loses no step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo, records
from tests.support.small_disk import small_disk

SETTINGS = (
    *("sft=null", "eval.every=0", "eval.before_training=false", "data.eval=[]", "export.enabled=false"),
    *("tracking.report=false", "rollout.max_response_tokens=64", "rollout.max_turn_tokens=32", "run.name=writes"),
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_is_full_for_a_while_costs_nothing(tmp_path: Path) -> None:
    ctpo = Ctpo(tmp_path)
    with small_disk(tmp_path / "runs", "200m") as disk:

        def fill(_: int) -> None:
            disk.fill()
            time.sleep(12)
            disk.free()

        status, output = ctpo.train_disturbed("[rl] step 2/", fill, *SETTINGS, "checkpoint.every=1", "run.steps=8")
        assert status == 0, output[-4000:]
        assert "it is tried again" in output.lower() and "Traceback" not in output
        assert [line["step"] for line in records(disk.path / "writes")] == list(range(9))
        assert (disk.path / "writes/checkpoints/step_000008/COMPLETE.json").exists()
