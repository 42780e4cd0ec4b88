"""SIGTERM while an engine is frozen during an update: the run does not wait for it, and saves within its grace."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.policy import latest_checkpoint
from ctpo_megatron.tracking import read_heartbeat
from tests.end_to_end.small_run import Ctpo
from tests.support.deadlines import scaled

GRACE_S = scaled(60)
SETTINGS = (
    "run.name=frozen",
    "run.steps=9",
    "sft=null",
    "eval.every=0",
    "eval.before_training=false",
    "export.enabled=false",
    "checkpoint.every=0",
    f"checkpoint.grace_s={GRACE_S:g}",
    "rollout.engines=2",
    "rollout.oversample=4",  # one engine alone completes a batch
    f"rollout.weights.timeout_s={20 * GRACE_S:g}",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sigterm_while_an_engine_is_frozen_in_an_update(tmp_path: Path) -> None:
    ctpo, run = Ctpo(tmp_path), tmp_path / "runs" / "frozen"
    sent_at = 0.0

    def freeze(process: int) -> None:
        """One engine takes no weights any more, until the trainer waits for it; then the run is to stop."""
        nonlocal sent_at
        engines = [p for p in psutil.Process(process).children(recursive=True) if "ray::RolloutEngine" in p.name()]
        assert len(engines) == 2
        engines[1].suspend()
        deadline = time.monotonic() + scaled(120)
        stuck = 0
        while stuck < 3:  # heartbeats in a row that were written in the update
            assert time.monotonic() < deadline
            heartbeat = read_heartbeat(run)
            in_update = heartbeat is not None and heartbeat.phase == "rl/step/publish"
            stuck = stuck + 1 if in_update else 0
            time.sleep(2)
        sent_at = time.monotonic()
        os.kill(process, signal.SIGTERM)

    status, output = ctpo.train_disturbed("[rl] step 1/9", freeze, *SETTINGS)
    assert status == 128 + signal.SIGTERM, output[-4000:]
    assert time.monotonic() < sent_at + GRACE_S
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None, output[-4000:]
    step = json.loads((checkpoint / "COMPLETE.json").read_text())["run"]["step"]
    assert step >= 2 and f"[rl] step {step}/9" in output
