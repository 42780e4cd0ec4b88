"""A run of many tiny steps to which something happens all the time, beside runs that are left alone.

    python -m tests.chaos.long_life [--steps 600] [--faults 60] [--minutes 45] [--calm 3] [--without "kill gcs" ...]

It has to end with every prompt accounted for, processes that do not grow, the reward of the others, and nothing left.
Everything that happens is printed. Exit status 1 where any of it does not hold. Needs root (`tests.chaos.machine`).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow.parquet as pq

from tests.chaos import machine
from tests.chaos.accounts import accounts
from tests.chaos.faults import ENDING, Fault, Faults, plan
from tests.chaos.memory import Growth, Watch
from tests.end_to_end.small_run import read, records
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import ROOT
from tests.support.task import sft_file, task_files, write_task

SAMPLES, PROMPTS, SAVES_EVERY = 4, 4, 5
SETTINGS = (
    *("run.root=runs", "run.resume=auto"),
    *(
        f"rollout.prompts_per_step={PROMPTS}",
        f"rollout.samples_per_prompt={SAMPLES}",
    ),
    *(f"policy.mini_batch_prompts={PROMPTS}", "policy.threads=1", "rollout.max_staleness=1"),
    *("rollout.partial=continue", "rollout.engines=2", "reward.workers=2", "eval.every=0"),
    *("eval.before_training=false", f"checkpoint.every={SAVES_EVERY}", "checkpoint.keep_last=2"),
    *("checkpoint.grace_s=60", "export.enabled=false", "tracking.live=plain", "tracking.report=false"),
    *("tracking.trackers=[]", "tracking.trajectories=all", "rollout.max_quarantined=100000"),
)
DISK_MB = 600
REWARDED = 50
"""Last steps whose mean reward is compared."""
TRY_AGAIN = 75
"""Exit status of a run that asks to be started again."""
SHARE_OF_LIFE = 0.2
"""Of the whole run that a process has to live for, for its memory to be looked at."""


class Run:
    """A run with its starts. starts: exit status of each that has ended."""

    def __init__(self, name: str, steps: int, seed: int, sft: Sequence[str], clock: Path | None = None) -> None:
        """sft: settings of its supervised stage. clock: file with what its time of day is off by."""
        self.name, self.log, self.folder = name, machine.WORK / f"{name}.log", machine.WORK / "runs" / name
        self.starts: list[int] = []
        self.left: list[machine.Left] = []
        program = ["ctpo_megatron.train"] if clock is None else ["tests.chaos.moved_clock", str(clock)]
        self._command = [sys.executable, "-m", *program, str(ROOT / "configs" / "quickstart.yaml"), *SETTINGS]
        self._command += [f"run.name={name}", f"run.steps={steps}", f"run.seed={seed}", *sft]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._before, self._done_before, self._looked = machine.there(), self._lines(), False
        with self.log.open("ab") as log:
            where = {"cwd": machine.WORK, "env": machine.environment(), "stdout": log, "stderr": log}
            return subprocess.Popen(self._command, start_new_session=True, **where)

    def _lines(self) -> int:
        return read(self.log).count("[rl] step ")

    @property
    def step(self) -> int:
        """The last step that is done; 0 until this start has made one."""
        found = re.findall(r"^\[rl\] step +(\d+)/", read(self.log), re.M)
        return int(found[-1]) if len(found) > self._done_before else 0

    def look(self) -> None:
        """Once this start has made a step: what is there that it did not make itself?"""
        if not self._looked and self.step:
            self._looked = True
            if left := self._before.still():
                self.left.append(left)
                print(f"left: {left}", flush=True)

    def again(self) -> bool:
        """Whether it runs on: it is started again after a fault that ends it, or an exit status that says so.

        Raises AssertionError for any other end.
        """
        status = self.process.poll()
        if status is None:
            return True
        self.starts.append(status)
        if status == 0:
            return False
        said = f"{self.name} ended with status {status}; start {len(self.starts) + 1}"
        assert status in (TRY_AGAIN, -signal.SIGKILL), f"{said}:\n{read(self.log)[-6000:]}"
        print(said, flush=True)
        self.process = self._start()
        return True

    def reward(self) -> float:
        """Mean of its last steps."""
        lines = [line["reward/mean"] for line in records(self.folder) if "reward/mean" in line]
        return statistics.fmean(lines[-REWARDED:])


def calm(run: Run, until: float) -> float:
    """The reward of a run that is left alone."""
    with ending(run):
        status = run.process.wait(max(1.0, until - time.monotonic()))
    assert status == 0, read(run.log)[-6000:]
    print(f"{run.name}: reward {run.reward():.3f}", flush=True)
    return run.reward()


@contextmanager
def ending(run: Run) -> Iterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)


def disturbed(run: Run, faults: Faults, planned: list[Fault], until: float) -> Counter[str]:
    """Do to the run what is planned, and see it end; how often what was done."""
    done: Counter[str] = Counter()
    pending = list(planned)
    with ending(run):
        while run.again():
            assert time.monotonic() < until, f"{run.name} is at step {run.step}, and its time is over"
            run.look()
            if pending and run.step >= pending[0].step and run.process.poll() is None:
                try:
                    what = faults.do(pending[0].kind, run.process.pid)
                except ProcessLookupError:
                    continue  # it ends, of an earlier fault
                print(f"step {run.step}: {pending[0].kind} {what}", flush=True)
                done[pending[0].kind] += 1
                if pending.pop(0).kind in ENDING:
                    run.process.wait(scaled(180))
            time.sleep(0.05)
    return done


class Findings:
    """What does not hold."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def check(self, holds: bool, what: str) -> None:
        """Print it, and remember it where it does not hold."""
        print(("ok: " if holds else "WRONG: ") + what, flush=True)
        if not holds:
            self.wrong.append(what)


def judge(run: Run, steps: int, rewards: list[float], growths: list[Growth], findings: Findings) -> None:
    """Accounts, lines, memory and reward of the run that was disturbed."""
    prompts = pq.read_table(machine.WORK / "runs" / "task" / "train.parquet", columns=["id"])["id"].to_pylist()
    sums = accounts(run.folder, steps, SAMPLES, prompts)
    findings.check(sums.exact, f"accounts: {sums}")
    lines = [line["step"] for line in records(run.folder)]
    findings.check(lines == list(range(steps + 1)), f"{len(lines)} lines of metrics, one for each step")
    findings.check(bool(growths), f"memory of {len(growths)} long-lived processes was followed")
    for growth in growths:
        findings.check(not growth.too_much, f"memory of {growth}")
    low, high = min(rewards), max(rewards)
    width, reward = high - low, run.reward()
    inside = low - width <= reward <= high + width
    findings.check(inside, f"reward {reward:.3f}; undisturbed {low:.3f} to {high:.3f}, widened by {width:.3f} each way")


def end_of(findings: Findings, run: Run) -> None:
    """Nothing is left of anything."""
    awaited(lambda: not machine.there(), 10)
    left = machine.there()
    findings.check(not left, f"left at the end: {left}")
    findings.check(not run.left, f"starts that found something of earlier ones: {len(run.left)}")


def main(args: argparse.Namespace) -> int:
    """All runs, one after the other, on a machine of their own."""
    machine.enter()
    disk, clock = machine.WORK / "runs", machine.WORK / "clock"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=True)
    clock.write_text("0")
    began = time.monotonic()
    until = began + 60 * args.minutes
    planned = plan(args.seed, args.steps, args.faults, args.without)
    task = disk / "task"
    write_task(task, "train_prompts=1024", "heldout_prompts=16")
    taught = [*task_files(task), sft_file(task), f"sft.steps={args.sft_steps}"]
    again = [*task_files(task), "sft=null", "model.path=runs/calm-0/sft_model"]
    rewards = [calm(Run(f"calm-{n}", args.steps, n, again if n else taught), until) for n in range(args.calm)]
    run = Run("disturbed", args.steps, args.calm, again if args.calm else taught, clock)
    at = time.monotonic()
    watch = Watch(lambda: run.process.pid if run.process.poll() is None else None)
    try:
        done = disturbed(run, Faults(args.seed, disk, clock), planned, until)
    finally:
        watch.close()
    lived = time.monotonic() - at
    findings = Findings()
    findings.check(done.total() >= args.faults, f"{done.total()} faults: {dict(done)}")
    findings.check(True, f"starts ended with {Counter(run.starts)}")
    judge(run, args.steps, rewards, watch.growths(SHARE_OF_LIFE * lived), findings)
    end_of(findings, run)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; wrong: {len(findings.wrong)}")
    return 1 if findings.wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.long_life", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="of each run (%(default)s)")
    parser.add_argument("--faults", type=int, default=60, help="that happen to the last run (%(default)s)")
    parser.add_argument("--minutes", type=float, default=45.0, help="for everything together (%(default)s)")
    parser.add_argument("--calm", type=int, default=3, help="runs that are left alone (%(default)s)")
    parser.add_argument("--sft-steps", type=int, default=1300, help="of the supervised stage (%(default)s)")
    parser.add_argument("--seed", type=int, default=44, help="of the plan (%(default)s)")
    parser.add_argument("--without", nargs="*", default=[], help="kinds of faults to leave out, such as 'kill gcs'")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    given = _parser().parse_args()
    if given.steps % SAVES_EVERY:
        sys.exit(f"--steps {given.steps}: a checkpoint has the accounts, so give a multiple of {SAVES_EVERY}")
    if given.inside:
        sys.exit(main(given))
    if reason := machine.reason_against():
        sys.exit(f"no machine of its own can be made here: {reason}")
    sys.exit(
        subprocess.run(machine.command("tests.chaos.long_life", *sys.argv[1:], "--inside"), check=False).returncode
    )
