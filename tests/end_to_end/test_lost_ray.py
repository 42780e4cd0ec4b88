"""Ray's GCS and raylet die in the middle of a run: it saves, or continues."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.base.stop import TRY_AGAIN
from tests.end_to_end.small_run import Ctpo, records
from tests.support.deadlines import scaled

SETTINGS = (
    *("run.name=daemons", "sft=null", "eval.every=0", "eval.before_training=false", "data.eval=[]"),
    *("export.enabled=false", "tracking.report=false", "checkpoint.every=0", "tracking.dump_every=1"),
    *("rollout.max_response_tokens=64", "rollout.max_turn_tokens=32"),
)


def kill(name: str, at: list[float]) -> Callable[[int], None]:
    def disturb(process: int) -> None:
        [found] = [each for each in psutil.Process(process).children(recursive=True) if each.name() == name]
        at.append(time.monotonic())
        found.send_signal(signal.SIGKILL)

    return disturb


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_without_its_gcs_is_saved_and_continues(ahead: int, tmp_path: Path) -> None:
    ctpo, run, at = Ctpo(tmp_path), tmp_path / "runs" / "daemons", list[float]()
    settings = (*SETTINGS, f"rollout.max_staleness={ahead}")
    status, output = ctpo.train_disturbed("[rl] step   2/", kill("gcs_server", at), *settings, "run.steps=200")
    assert status == TRY_AGAIN, output[-4000:]
    assert time.monotonic() - at[0] < scaled(30)
    lines = output.splitlines()
    [said] = [number for number, line in enumerate(lines) if "Ray's GCS (process " in line]
    assert lines[said].endswith("died: a checkpoint follows, within 120 s (checkpoint.grace_s)")
    assert lines[-1].startswith("continue with: ctpo train ") and lines[-1].endswith(" run.resume=auto")
    assert not [line for line in lines[said:] if "Traceback" in line]
    done = records(run)[-1]["step"]
    assert (run / f"checkpoints/step_{done:06d}/COMPLETE.json").exists()
    again = ctpo.train(*settings, f"run.steps={done + 1}", "run.resume=auto")
    assert again.returncode == 0, again.stderr[-4000:]
    assert [line["step"] for line in records(run)] == list(range(done + 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_its_raylet_goes_on_until_an_engine_is_to_be_replaced(tmp_path: Path) -> None:
    ctpo, run, at = Ctpo(tmp_path), tmp_path / "runs" / "daemons", list[float]()

    def disturb(process: int) -> None:
        kill("raylet", at)(process)
        before = len(records(run))
        while time.monotonic() < at[0] + 20 or len(records(run)) < before + 3:  # longer than Ray's health checks
            assert time.monotonic() < at[0] + scaled(120)
            time.sleep(0.5)
        engines = [p for p in psutil.Process(process).children(recursive=True) if "ray::RolloutEngine" in p.name()]
        orphans = [p for p in psutil.process_iter(["name", "cwd"]) if "ray::RolloutEngine" in (p.info["name"] or "")]
        for engine in engines or [p for p in orphans if p.info["cwd"] == str(tmp_path)]:
            os.kill(engine.pid, signal.SIGKILL)

    status, output = ctpo.train_disturbed("[rl] step   2/", disturb, *SETTINGS, "run.steps=900")
    assert status == TRY_AGAIN, output[-4000:]
    assert re.search(r"Ray's raylet \(process \d+\) died: a checkpoint follows", output)
    done = records(run)[-1]["step"]
    assert (run / f"checkpoints/step_{done:06d}/COMPLETE.json").exists()
