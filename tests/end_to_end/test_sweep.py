"""A sweep of two seeds, killed within the first SFT and stopped within the second RL: both runs are whole."""

from __future__ import annotations

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


def sweep_until(ctpo: Ctpo, after: str, text: str, number: signal.Signals) -> tuple[int, str]:
    """Sweep until `text` comes `after` something, then send a signal to the sweep alone; its status and output."""
    log = ctpo.directory / f"{number.name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(), cwd=ctpo.directory, env=ctpo.environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + scaled(500)
        while text not in read(log).partition(after)[2]:
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
    status, _ = sweep_until(ctpo, "[sweep] seed0", "[sft] 1/40", signal.SIGKILL)
    first, second = (ctpo.directory / "runs" / "swept" / name for name in ("seed0", "seed1"))
    assert status == -signal.SIGKILL
    assert any((first / "checkpoints" / "sft").glob("step_*")) and not (first / "sft_model").exists()
    status, said = sweep_until(ctpo, "[sweep] seed1", "[rl] step 1/3", signal.SIGTERM)
    assert status == 143 and "continuing after SFT step" in said
    assert f"stopped in {second.relative_to(ctpo.directory)}; the same command continues" in said
    model = (first / "model/model.safetensors").stat()
    done = children.run(command(), directory=ctpo.directory, environment=ctpo.environment, deadline_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "[sft]" not in done.stdout and done.stdout.count("continuing after step") == 1
    assert (first / "model/model.safetensors").stat().st_mtime_ns == model.st_mtime_ns  # it was finished

    assert (first.parent / "comparison.html").read_text().count("seed") > 0
    assert [repeatable(line) for line in records(first)] == [repeatable(line) for line in records(finished)]
    assert [repeatable(line) for line in records(second)] != [repeatable(line) for line in records(finished)]
    assert len(records(second)) == len(records(finished))
    assert (first / "model/model.safetensors").read_bytes() == (finished / "model/model.safetensors").read_bytes()
