"""Runs a sweep: one `ctpo train` after the other, each a process that ends with this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

from ctpo_megatron.base.printable import say
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.signals import heeded, say_in_handler
from ctpo_megatron.run.directory import claim
from ctpo_megatron.sweep.plan import PlannedRun, Sweep
from ctpo_megatron.sweep.record import SweepRecord, is_done
from ctpo_sandbox.libc import die_with_parent

CLOSING_S = 120.0  # for a run to close its engines and its sandbox, after `checkpoint.grace_s`
LOCK_POLL_S = 0.5  # between two attempts to lock a run directory


STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit statuses of a run that has stopped on request; the sweep stops with it."""
RunCommand = Callable[[PlannedRun], Sequence[str]]


@dataclass
class SweepOutcome:
    """How a sweep ended. status: exit status. failed: name and exit status, or what it needed that failed."""

    status: int = 0
    finished: list[PlannedRun] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def train_command(config: str, ranks: int) -> RunCommand:
    """The command of a run on this node: `ctpo train`, or its ranks under torchrun."""
    if ranks == 1:
        start = [sys.executable, "-m", "ctpo_megatron.train"]
    else:
        torchrun = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "ctpo_megatron.train"]
        start = [sys.executable, "-m", "ctpo_launchers.child", *torchrun]
    return lambda run: [*start, config, *run.overrides]


class Runner:
    """Runs what is left of a sweep, in order, and records every start and end in `sweep.json`.

    A run that fails does not end the sweep; a stop signal does, once the current run has saved its state.
    """

    def __init__(self, sweep: Sweep, record: SweepRecord, command: RunCommand, *, leads: bool = False) -> None:
        """leads: the processes of a run lead a session and watch their standard input, as launchers do."""
        self._sweep, self._record, self._command, self._leads = sweep, record, command, leads
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped_by: int | None = None
        self._grace_s = CLOSING_S

    def run(self) -> SweepOutcome:
        """Run everything that is not finished. Raises BlockingIOError when another sweep of this name is running."""
        directory = self._sweep.directory
        directory.mkdir(parents=True, exist_ok=True)
        lock = claim(directory)
        before = {number: signal.signal(number, self._on_signal) for number in heeded()}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        try:
            return self._run_all()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(lock)

    def _run_all(self) -> SweepOutcome:
        outcome = SweepOutcome()
        self._write()
        for number, run in enumerate(self._sweep.runs, start=1):
            if run.sft is not None and not is_done(run) and run.sft not in outcome.failed:
                self._do(self._sweep.sfts[run.sft], f"SFT for {run.name} and others", outcome)
            if run.sft in outcome.failed and not is_done(run):
                self._record.state_of(run.name).state = "failed"
                outcome.failed[run.name] = f"{run.sft} failed"
            elif not outcome.status:
                self._do(run, f"run {number} of {len(self._sweep.runs)}", outcome)
            if outcome.status:
                return outcome
        outcome.status = 1 if outcome.failed else 0
        return outcome

    def _do(self, run: PlannedRun, what: str, outcome: SweepOutcome) -> None:
        """Do a run, or its rest."""
        state = self._record.state_of(run.name)
        if is_done(run):
            state.state = "finished"
            status = 0
        else:
            say(f"[sweep] {what}: {run.name}" + (f" ({run.shown})" if run.values else ""))
            state.state, state.status = "running", None
            self._write()
            try:
                status = self._status(run)
            except TimeoutError as error:
                say(f"[sweep] {error}")
                status = 1
            state.status = status
            stopped = self._stopped_by is not None or status in STOPPED
            state.state = "stopped" if stopped else "failed" if status else "finished"
            if stopped:
                outcome.status = self._stop_status(status)
        self._write()
        if state.state == "finished" and run in self._sweep.runs:
            outcome.finished.append(run)
        elif state.state == "failed":
            outcome.failed[run.name] = f"exit status {status}"
            print(f"[sweep] {run.name} failed with exit status {status}; the sweep continues", flush=True)

    def _write(self) -> None:
        self._record.write(self._sweep.directory)

    def _status(self, run: PlannedRun) -> int:
        """Run a process to its end; its exit status, as a shell would give it."""
        self._grace_s = run.config.checkpoint.grace_s + CLOSING_S
        self._wait_until_free(run.directory)
        if self._stopped_by is not None:
            return self._stop_status(0)
        end_with_us = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        stdin = subprocess.PIPE if self._leads else None
        command, environment = list(self._command(run)), dict(os.environ)
        if self._leads:  # else torchrun kills its ranks after 30 s
            environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = f"{self._grace_s:.0f}"
        # Signals wait until the process is known, to which they are passed on.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, heeded())
        try:
            restore = partial(_prepare, end_with_us, blocked)
            self._process = subprocess.Popen(
                command, stdin=stdin, env=environment, preexec_fn=restore, start_new_session=self._leads
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            status = self._process.wait()
        finally:
            self._process = None
            signal.setitimer(signal.ITIMER_REAL, 0)
        return status if status >= 0 else 128 - status

    def _wait_until_free(self, directory: Path) -> None:
        """A run of a sweep that was killed may still be saving. Raises TimeoutError, which names its process."""
        if not RunPaths(directory).owner.exists():
            return
        deadline, said = time.monotonic() + self._grace_s, False
        while self._stopped_by is None:
            try:
                os.close(claim(directory))
                return
            except BlockingIOError as owner:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{directory} is still being written by {owner}: end it") from owner
                if not said:
                    print(f"[sweep] waiting for {owner}, which writes to {directory} ({self._grace_s:g} s)", flush=True)
                said = True
                time.sleep(LOCK_POLL_S)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stopped_by is None:
            self._stopped_by = number
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        if (process := self._process) is not None:
            # torchrun passes on SIGINT and SIGTERM in any case.
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if (process := self._process) is not None:
            say_in_handler(f"[sweep] process {process.pid} has not ended within {self._grace_s:g} s: killed")
            process.kill()

    def _stop_status(self, status: int) -> int:
        if status in STOPPED:
            return status
        return 128 + (signal.SIGINT if self._stopped_by == signal.SIGINT else signal.SIGTERM)


def _prepare(end_with_us: Callable[[], None], mask: set[int | signal.Signals]) -> None:
    """In the child, before its program: it ends with this process, and takes the signals that this one does."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_us()
