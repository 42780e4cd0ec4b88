"""Ray's GCS or raylet dies in the middle of a run, which saves its state and ends."""

from __future__ import annotations

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
@pytest.mark.parametrize(("name", "ahead"), [("gcs_server", 0), ("gcs_server", 1), ("raylet", 0)])
def test_a_run_that_has_lost_its_ray_is_saved_and_continues(name: str, ahead: int, tmp_path: Path) -> None:
    ctpo, run, at = Ctpo(tmp_path), tmp_path / "runs" / "daemons", list[float]()
    settings = (*SETTINGS, f"rollout.max_staleness={ahead}")
    status, output = ctpo.train_disturbed("[rl] step   2/", kill(name, at), *settings, "run.steps=200")
    assert status == TRY_AGAIN, output[-4000:]
    assert time.monotonic() - at[0] < scaled(30)
    lines = output.splitlines()
    [said] = [number for number, line in enumerate(lines) if f"Ray's {name} (process " in line]
    assert lines[said].endswith("died: a checkpoint follows, within 120 s (checkpoint.grace_s)")
    assert lines[-1].startswith("continue with: ctpo train ") and lines[-1].endswith(" run.resume=auto")
    assert not [line for line in lines[said:] if "Traceback" in line]
    done = records(run)[-1]["step"]
    assert (run / f"checkpoints/step_{done:06d}/COMPLETE.json").exists()
    again = ctpo.train(*settings, f"run.steps={done + 1}", "run.resume=auto")
    assert again.returncode == 0, again.stderr[-4000:]
    assert [line["step"] for line in records(run)] == list(range(done + 2))
