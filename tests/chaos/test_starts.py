"""A process that is killed while it starts costs no more than one that is killed later."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.chaos import kills
from tests.end_to_end.small_run import SMALL, Ctpo, read
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

SETTINGS = (
    *SMALL,
    *("sft=null", "export.enabled=false", "tracking.report=false", "eval.every=0", "eval.before_training=false"),
    *("run.steps=40", "checkpoint.every=2", "rollout.max_staleness=1", "rollout.max_turn_tokens=32"),
)
SANDBOX = ("sandbox server", "sandbox template", "sandbox worker")
FIRST = ("results queue", "checkpoint writer", "scorer", "fork server", *SANDBOX, "engine")
REPLACED = ("results queue", "scorer", "fork server", "sandbox server", "sandbox worker", "engine")
TRY_AGAIN = 75
"""Exit status of a run that asks to be started again."""


class Watched:
    """A run, and the processes of one kind in it."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind, self.log, self._directory = kind, directory / "log", directory

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The run; what is left of it is killed in the end."""
        command = [sys.executable, "-m", "ctpo_megatron.train", str(ROOT / "configs" / "quickstart.yaml"), *SETTINGS]
        with self.log.open("wb") as log:
            output: Any = {"stdout": log, "stderr": log, "start_new_session": True}
            environment = Ctpo(self._directory).environment
            self.process = subprocess.Popen(command, cwd=self._directory, env=environment, **output)
        try:
            yield self.process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def await_step(self, step: int) -> None:
        deadline = time.monotonic() + scaled(200)
        while f"[rl] step {step}/" not in re.sub(" +", " ", read(self.log)) and time.monotonic() < deadline:
            assert self.process.poll() is None, read(self.log)[-4000:]
            time.sleep(0.02)

    def kill_new(self, known: set[int], count: int) -> int:
        """Kill processes of the kind that are not known, as soon as each is there; how many were killed."""
        killed, deadline = 0, time.monotonic() + scaled(120)
        while killed < count and self.process.poll() is None and time.monotonic() < deadline:
            for process in self._there():
                if process.pid not in known and killed < count:
                    known.add(process.pid)
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                        killed += 1
        return killed

    def known(self) -> set[int]:
        return {process.pid for process in self._there()}

    def _there(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return kills.of_kind(self.process.pid, self.kind)
        return []


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIRST)
def test_one_that_is_killed_as_it_first_starts(kind: str, tmp_path: Path) -> None:
    watched = Watched(tmp_path, kind)
    with watched.started() as process:
        assert watched.kill_new(set(), 1) == 1
        status = process.wait(scaled(300))
    said = read(watched.log)
    assert status in (0, TRY_AGAIN) and "Traceback" not in said, said[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPLACED)
def test_a_replacement_that_is_killed_as_it_starts(kind: str, tmp_path: Path) -> None:
    watched = Watched(tmp_path, kind)
    with watched.started() as process:
        watched.await_step(2)
        known = watched.known()
        kills.kill(process.pid, kind, len(known), random.Random(0))
        killed = watched.kill_new(known, 1)
        status = process.wait(scaled(300))
    said = read(watched.log)
    assert (status, killed) == (0, 1), said[-6000:]
    assert "Traceback" not in said or kind == "results queue", said[-6000:]  # a writer that cannot report prints one
