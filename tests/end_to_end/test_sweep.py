"""A sweep of two seeds, killed within SFT and stopped within RL: its first run is the run that does SFT itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.small_run import ROOT, SMALL, Ctpo, read, records, repeatable
from tests.support import children
from tests.support.deadlines import scaled

pytestmark = pytest.mark.slow
SWEEP = ("run.name=swept", "checkpoint.sft_every=10", "--grid", "run.seed=0,1")


def command() -> list[str]:
    return [sys.executable, "-m", "ctpo_megatron.cli", "sweep", str(ROOT / "configs/quickstart.yaml"), *SMALL, *SWEEP]


def sweep_until(ctpo: Ctpo, text: str, number: signal.Signals) -> tuple[int, str]:
    """Sweep until a line has `text`, then send a signal to the sweep alone; its status and its output."""
    log = ctpo.directory / f"{number.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(), cwd=ctpo.directory, env=ctpo.environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + scaled(500)
        while text not in read(log):
            assert process.poll() is None and time.monotonic() < deadline, read(log)[-4000:]
            time.sleep(0.1)
        process.send_signal(number)
        status = process.wait(scaled(200))
        if number != signal.SIGKILL:
            return status, read(log)
        while "SIGTERM: a checkpoint follows" not in read(log) and "continue with" not in read(log):
            assert time.monotonic() < deadline, read(log)[-4000:]
            time.sleep(0.1)
        while "continue with" not in read(log):  # the run has ended by itself, after the sweep
            assert time.monotonic() < deadline, read(log)[-4000:]
            time.sleep(0.1)
        return status, read(log)
    finally:
        children.end(process)


@pytest.mark.timeout(2400)
def test_a_sweep_goes_on_after_a_kill_and_a_stop(ctpo: Ctpo, finished: Path) -> None:
    status, _ = sweep_until(ctpo, "[sft] 1/40", signal.SIGKILL)
    sft = ctpo.directory / "runs" / "swept" / "sft"
    assert status == -signal.SIGKILL
    assert any((sft / "checkpoints" / "sft").glob("step_*")) and not (sft / "sft_model.json").exists()
    status, said = sweep_until(ctpo, "[rl] step 1/3", signal.SIGTERM)
    assert status == 143 and "continuing after SFT step" in said
    assert "1 stopped" in said and "continue with: ctpo sweep " in said.splitlines()[-1]
    done = children.run(command(), directory=ctpo.directory, environment=ctpo.environment, deadline_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "[sft]" not in done.stdout and "continuing after step" in done.stdout

    assert (sft.parent / "comparison.html").read_text().count("seed") > 0
    record = json.loads((sft.parent / "sweep.json").read_text())
    assert [(run["name"], run["state"]) for run in record["runs"]] == [("seed0", "finished"), ("seed1", "finished")]
    first, second = (sft.parent / name for name in ("seed0", "seed1"))
    assert [repeatable(line) for line in records(first)] == [repeatable(line) for line in records(finished)]
    assert [repeatable(line) for line in records(second)] != [repeatable(line) for line in records(finished)]
    assert (first / "model/model.safetensors").read_bytes() == (finished / "model/model.safetensors").read_bytes()
    assert all('"sft_from"' in (run / "environment.json").read_text() for run in (first, second))
