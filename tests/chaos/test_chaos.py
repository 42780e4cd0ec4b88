"""Processes of an asynchronous run are killed at random moments: it goes on, and loses no prompt.

Its log with the accounts of every step is printed, and kept in `chaos.txt` of the run.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.stop import TRY_AGAIN
from tests.chaos import kills
from tests.chaos.accounts import accounts
from tests.chaos.failing_prompts import always_fails
from tests.end_to_end.small_run import Ctpo, read, records, train_main
from tests.support import ranks
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT, Child
from tests.support.task import sft_file, task_files, task_folder

STEPS, KILLED_STEPS, SEED, SAMPLES = 15, 10, 15, 8
"""Kills come later than planned when the run had to be started again."""
SETTINGS = (
    "run.name=chaos",
    "run.resume=auto",
    f"run.steps={STEPS}",
    "rollout.max_staleness=1",
    "rollout.partial=continue",
    "rollout.engines=2",
    f"rollout.samples_per_prompt={SAMPLES}",
    "reward.workers=2",
    "policy.threads=1",
    "policy.optimizer.lr=6.0e-4",  # ten steps are few
    "eval.every=0",
    "checkpoint.every=1",  # which has the accounts
    f"checkpoint.keep_last={STEPS + 1}",
    "export.enabled=false",
    "tracking.live=plain",
    "tracking.report=false",
    'rollout.environment="failing_prompts:FailingPrompts"',
    f"extensions.path=[{Path(__file__).parent}]",
)
DEADLINE_S = 1500.0
STARTS = 4


class Chaos:
    """A run, and what is done to it. It ends when no engine is left with its weights, and is started again then."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run = directory, directory / "runs" / "chaos"
        self.done: list[tuple[kills.Kill, list[int]]] = []
        self.logs: list[Path] = []

    @property
    def log(self) -> str:
        """What all starts have printed."""
        return "".join(map(read, self.logs))

    def _start(self) -> Child:
        task = task_folder("heldout_prompts=16")
        command = [str(ROOT / "configs" / "quickstart.yaml"), *SETTINGS, *task_files(task), sft_file(task)]
        self.logs.append(self.directory / f"output{len(self.logs)}.log")
        how: dict[str, Any] = {"directory": self.directory, "environment": Ctpo(self.directory).environment}
        return ranks.prefork().start(train_main, command, self.logs[-1], output=self.directory / "run", **how)

    def _wait(self, seconds: float) -> int | None:
        """The exit status, once it needs no other start."""
        status = self.process.wait(seconds)
        if status != TRY_AGAIN or len(self.logs) == STARTS:
            return status
        self.process.end()
        self.process = self._start()
        return None

    def play(self) -> int | None:
        """Start it, kill by plan, and wait for its end; the exit status."""
        self.process = self._start()
        deadline = time.monotonic() + scaled(DEADLINE_S)
        try:
            rng = random.Random(SEED)
            for kill, due in self._moments(deadline):
                while self._wait(0.02) is None and time.monotonic() < due:
                    pass
                self.done.append((kill, self._kill(kill.kind, rng)))
            status = None
            while status is None and time.monotonic() < deadline:
                status = self._wait(1.0)
            return status
        finally:
            self.process.end()

    def _kill(self, kind: str, rng: random.Random) -> list[int]:
        """As many as there are to be: what was killed just before has to come back first."""
        killed: list[int] = []
        deadline = time.monotonic() + scaled(60)
        while self._wait(0.05) is None and time.monotonic() < deadline and len(killed) < kills.KINDS[kind]:
            killed += kills.kill(self.process.pid, kind, kills.KINDS[kind] - len(killed), rng)
        return killed

    def _moments(self, deadline: float) -> Iterator[tuple[kills.Kill, float]]:
        """Each planned kill, once its step is under way, and the time at which it is due."""
        began = {0: time.monotonic()}
        for kill in kills.plan(SEED, KILLED_STEPS):
            while kill.step not in began and self._wait(0.1) is None and time.monotonic() < deadline:
                for step in range(1, len(re.findall(r"^\[rl\] step ", self.log, re.M)) + 1):
                    began.setdefault(step, time.monotonic())
            lasted = began.get(kill.step, 0.0) - began.get(kill.step - 1, 0.0) if kill.step > 1 else 5.0
            yield kill, began.get(kill.step, 0.0) + kill.fraction * min(lasted, 20.0)

    def account(self) -> str:
        """What was killed, and the accounts of every step."""
        rewards = {line["step"]: line.get("reward/mean") for line in records(self.run)}
        lines = []
        for step in range(STEPS + 1):
            lines += [f"  killed in step {step}: {k.kind} {ids}" for k, ids in self.done if k.step == step - 1]
            if step:
                lines.append(f"step {step}: reward {rewards[step]:.3f}; {accounts(self.run, step, SAMPLES)}")
        return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_whose_processes_are_killed_goes_on_and_loses_no_prompt(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path)
    status = chaos.play()
    assert status == 0, chaos.log[-6000:]
    account = chaos.account()
    (chaos.run / "chaos.txt").write_text(account + "\n")
    print(account)
    killed = Counter({kind: sum(len(ids) for k, ids in chaos.done if k.kind == kind) for kind in kills.KINDS})
    assert killed == {kind: kills.TIMES * number for kind, number in kills.KINDS.items()}
    every = [accounts(chaos.run, step, SAMPLES) for step in range(1, STEPS + 1)]
    assert all(each.exact for each in every), account
    gone = every[-1].quarantined
    assert gone and sorted(gone) == sorted(filter(always_fails, every[-1].consumed))
    assert len(every[-1].trained) == 32 * STEPS and not every[-1].buffered and not every[-1].in_flight
    lines = records(chaos.run)[1:]
    assert sum(line["rollout/engine_restarts"] for line in lines) >= 1  # not of one that was killed as it started
    assert all(line["rollout/staleness_max"] <= 1 for line in lines)
    rewards = [line["reward/mean"] for line in lines]
    assert statistics.fmean(rewards[-3:]) >= rewards[0] + 0.1, account
