"""Order, resume, failure and stop of a sweep, whose runs are processes that only record what they are asked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import children
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

GRID = ("objective.preset=ctpo,grpo", "run.seed=0,1")
RUNS = ["ctpo-seed0", "ctpo-seed1", "grpo-seed0", "grpo-seed1"]


class Sweeping:
    """Sweeps in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script()

    def script(self, **what: list[str]) -> None:
        script = {name.replace("_", "-"): starts for name, starts in what.items()}
        (self.folder / "script.json").write_text(json.dumps(script))

    def command(self, *words: str) -> list[str]:
        mode, items = (words[0], words[1:]) if words[:1] in (("each",), ("impatient",)) else ("once", words)
        return [sys.executable, "-m", "tests.sweep.sweep_stand_ins", mode, *(items or GRID)]

    @property
    def how(self) -> dict[str, Any]:
        paths = [ROOT, *(ROOT / name for name in ("answers", "kernels", "sandbox", "launchers"))]
        return {"env": os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}, "cwd": self.folder}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "events.txt").unlink(missing_ok=True)
        return children.run(self.command(*words), environment=self.how["env"], directory=self.folder, deadline_s=120)

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(self.command(*words), text=True, start_new_session=True, **streams, **self.how)
        try:
            yield process
        finally:
            children.end(process)

    def events(self, of: str = "") -> list[str]:
        file = self.folder / "events.txt"
        return [line for line in file.read_text().splitlines() if line.startswith(of)] if file.exists() else []

    def wait_for(self, event: str) -> str:
        deadline = time.monotonic() + scaled(60)
        while not (found := self.events(event)):
            assert time.monotonic() < deadline, f"no {event} in {self.events()}"
            time.sleep(0.05)
        return found[0]

    @property
    def states(self) -> dict[str, tuple[str, int | None]]:
        record = json.loads((self.folder / "runs" / "mine" / "sweep.json").read_text())
        return {run["name"]: (run["state"], run["status"]) for run in [*record["sft_runs"], *record["runs"]]}

    @property
    def outcome(self) -> list[Any]:
        found: list[Any] = json.loads((self.folder / "outcome.json").read_text())
        return found


@pytest.fixture
def sweeping(tmp_path: Path) -> Sweeping:
    return Sweeping(tmp_path)


def test_one_sft_then_every_run_from_it_and_nothing_twice(sweeping: Sweeping) -> None:
    done = sweeping.run()
    assert done.returncode == 0, done.stderr
    expected = ["start sft", "from sft None", "end sft"]
    for name in RUNS:
        expected += [f"start {name}", f'from {name} "runs/mine/sft"', f"end {name}"]
    assert sweeping.events() == expected
    assert set(sweeping.states.values()) == {("finished", 0)}
    assert sweeping.run("objective.preset=ctpo,grpo", "run.seed=0,1,2").returncode == 0
    assert sweeping.events("start") == ["start ctpo-seed2", "start grpo-seed2"]
    assert sorted(sweeping.outcome[1]) == sorted([*RUNS, "ctpo-seed2", "grpo-seed2"])  # all are compared


def test_each_seed_has_an_sft_and_one_that_fails_takes_its_runs_along(sweeping: Sweeping) -> None:
    sweeping.script(sft_seed0=["fail"])
    assert sweeping.run("each", *GRID).returncode == 1
    assert [event.split()[1] for event in sweeping.events("start")] == [
        "sft-seed0",
        "sft-seed1",
        "ctpo-seed1",
        "grpo-seed1",
    ]
    assert 'from grpo-seed1 "runs/mine/sft-seed1"' in sweeping.events()
    failed = {"sft-seed0": "exit status 3", "ctpo-seed0": "sft-seed0 failed", "grpo-seed0": "sft-seed0 failed"}
    assert sweeping.outcome == [1, ["ctpo-seed1", "grpo-seed1"], failed]
    assert sweeping.states["ctpo-seed0"] == ("failed", None)


def test_a_failed_run_does_not_end_the_sweep_and_is_tried_again(sweeping: Sweeping) -> None:
    sweeping.script(ctpo_seed1=["fail"])
    assert sweeping.run().returncode == 1
    assert [event.split()[1] for event in sweeping.events("start")] == ["sft", *RUNS]
    assert sweeping.states["ctpo-seed1"] == ("failed", 3) and sweeping.states["grpo-seed1"] == ("finished", 0)
    assert sweeping.outcome == [1, ["ctpo-seed0", "grpo-seed0", "grpo-seed1"], {"ctpo-seed1": "exit status 3"}]
    sweeping.script()
    assert sweeping.run().returncode == 0
    assert sweeping.events("start") == ["start ctpo-seed1"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(signal.SIGUSR1, 143, marks=pytest.mark.slow)],
)
def test_a_signal_stops_the_current_run_and_the_sweep_with_it(sweeping: Sweeping, number: int, status: int) -> None:
    sweeping.script(ctpo_seed1=["wait"])
    with sweeping.started() as process:
        sweeping.wait_for("waiting ctpo-seed1")
        process.send_signal(number)
        assert process.wait(scaled(60)) == status
    assert sweeping.events()[-1] == "saved ctpo-seed1"
    assert sweeping.states["ctpo-seed1"] == ("stopped", status) and sweeping.states["grpo-seed0"] == ("waiting", None)
    if number == signal.SIGTERM:
        sweeping.script()
        assert sweeping.run().returncode == 0
        assert [event.split()[1] for event in sweeping.events("start")] == RUNS[1:]


def test_a_run_that_stops_by_itself_as_at_the_end_of_a_job_stops_the_sweep(sweeping: Sweeping) -> None:
    sweeping.script(ctpo_seed0=["wait"])
    with sweeping.started() as process:
        os.kill(int(sweeping.wait_for("waiting ctpo-seed0").split()[2]), signal.SIGTERM)
        assert process.wait(scaled(60)) == 143
    assert sweeping.events("start") == ["start sft", "start ctpo-seed0"]


def test_a_run_that_does_not_end_is_killed_and_named(sweeping: Sweeping) -> None:
    sweeping.script(ctpo_seed0=["wait"])
    (sweeping.folder / "hold").touch()
    with sweeping.started("impatient", *GRID) as process:
        child = int(sweeping.wait_for("waiting ctpo-seed0").split()[2])
        process.terminate()
        out, _ = process.communicate(timeout=scaled(60))
    assert process.returncode == 143, out
    assert f"[sweep] process {child} has not ended within 2 s: killed" in out.splitlines()
    assert sweeping.states["ctpo-seed0"] == ("stopped", 137)
    assert sweeping.events("start") == ["start sft", "start ctpo-seed0"]


def test_a_killed_sweep_takes_its_run_along_and_the_next_waits_for_it(sweeping: Sweeping) -> None:
    sweeping.script(sft=["wait"])
    (sweeping.folder / "hold").touch()
    with sweeping.started() as process:
        child = int(sweeping.wait_for("waiting sft").split()[2])
        process.kill()
        with sweeping.started() as again:
            assert again.stdout is not None
            assert again.stdout.readline() == "[sweep] SFT for ctpo-seed0 and others: sft\n"
            assert again.stdout.readline().startswith(f"[sweep] waiting for process {child}, which writes to ")
            assert sweeping.events("start") == ["start sft"]
            (sweeping.folder / "hold").unlink()  # it has saved, because it was asked to when its parent died
            assert again.wait(scaled(60)) == 0
    assert sweeping.events("saved") == ["saved sft"]
    assert sweeping.events("end") == ["end sft", *(f"end {name}" for name in RUNS)]


def test_one_sweep_at_a_time(sweeping: Sweeping) -> None:
    sweeping.script(sft=["wait"])
    with sweeping.started() as process:
        sweeping.wait_for("waiting sft")
        with sweeping.started() as second:
            assert second.wait(scaled(60)) == 1  # BlockingIOError, which names the first
        assert sweeping.events("start") == ["start sft"]
        process.terminate()
        assert process.wait(scaled(60)) == 143
