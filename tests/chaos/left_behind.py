"""Kills each kind of process of a run with SIGKILL, and looks at each next start for what is left.

    python -m tests.chaos.left_behind TIMES [WITHOUT ...]    in a machine of its own (`machine.command`)

Prints what it killed and what it found; exit status 1 when anything was left.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

from tests.chaos import kills, machine
from tests.end_to_end.small_run import SMALL, read
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import ROOT

SETTINGS = (
    *SMALL,
    *("sft=null", "export.enabled=false", "tracking.report=false", "eval.every=0", "eval.before_training=false"),
    *("run.name=left", "run.steps=100000", "run.resume=auto", "checkpoint.every=3", "checkpoint.keep_last=1"),
    *("checkpoint.grace_s=20", "rollout.max_staleness=1", "rollout.max_response_tokens=64"),
    "rollout.max_turn_tokens=32",
)
ENDS = ("trainer", "gcs", "raylet", "agent of ray")
"""Kinds whose death ends a run: a raylet ends with its agent."""
_LOG = machine.WORK / "log"


class Victim:
    """A run that continues from its last checkpoint at each start. killed: how often each kind was."""

    def __init__(self, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self.found: list[machine.Left] = []
        self._rng = random.Random(seed)
        self._run = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        """Start it, and once it has made a step, note what was there before."""
        before = machine.there()
        command = [sys.executable, "-m", "ctpo_megatron.train", str(ROOT / "configs" / "quickstart.yaml"), *SETTINGS]
        with _LOG.open("ab") as log:
            run = subprocess.Popen(
                command, cwd=machine.WORK, env=machine.environment(), stdout=log, stderr=log, start_new_session=True
            )
        self._await_step(run)
        assert run.poll() is None, read(_LOG)[-4000:]
        if left := before.still():
            print(f"left: {left}", flush=True)
            self.found.append(left)
        return run

    def _await_step(self, run: subprocess.Popen[bytes]) -> None:
        """Return after two further steps, or when the run has ended."""
        steps = _steps()
        moved = awaited(lambda: _steps() >= steps + 2 or run.poll() is not None, 120)
        assert moved, f"no step for {scaled(120):g} s:\n{read(_LOG)[-4000:]}"

    def kill(self, kind: str) -> None:
        """Kill one of that kind, and wait until the run has made steps again, after a new start where it has ended."""
        chosen = awaited(lambda: kills.kill(self._run.pid, kind, 1, self._rng), 60, every=0.02)
        assert chosen, f"there is no {kind} to be killed"
        self.killed[kind] += 1
        if kind in ENDS:
            self._run.wait(scaled(120))
        else:
            self._await_step(self._run)
        ended = self._run.poll()
        print(f"killed {kind} {chosen}" + ("" if ended is None else f": status {ended}"), flush=True)
        if ended is not None:
            self._run = self._started()

    def _stop(self) -> None:
        """As a scheduler does."""
        self._run.terminate()
        print(f"ended with status {self._run.wait(scaled(120))}", flush=True)

    def end(self) -> None:
        """Stop it; then nothing at all is to be there."""
        self._stop()
        awaited(lambda: not machine.there(), 10)
        left = machine.there()
        if left:
            print(f"left at the end: {left}", flush=True)
            self.found.append(left)


def _steps() -> int:
    """Of all starts together, with those that were made again."""
    return read(_LOG).count("[rl] step ")


def main(times: int, without: Sequence[str]) -> int:
    """Each kind so often; `without`: kinds that are left out."""
    machine.enter()
    victim = Victim(seed=5)
    kinds = [kind for kind in kills.EVERY if kind not in without]
    rng = random.Random(5)
    for _ in range(times):
        for kind in sorted(rng.sample(kinds, len(kinds)), key=ENDS.__contains__):
            victim.kill(kind)
    victim.end()
    print(f"killed: {dict(victim.killed)}; starts that found something: {len(victim.found)}")
    assert set(victim.killed) == set(kinds) and min(victim.killed.values()) >= times
    return 1 if victim.found else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
