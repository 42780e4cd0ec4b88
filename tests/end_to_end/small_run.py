"""A quickstart cut down to seconds, run through the real command in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.tracking import read_trajectories
from tests.compare_runs import repeatable as repeatable
from tests.support import children
from tests.support import ranks as pool
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import PYTHONPATH, ROOT, Child
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

TASK = task_folder(*SMALL_TASK)
SMALL = (
    *task_files(TASK),
    sft_file(TASK),
    "sft.steps=40",
    "run.steps=3",
    "rollout.prompts_per_step=4",
    "policy.mini_batch_prompts=2",
    "policy.threads=1",  # tests run beside each other
    "rollout.samples_per_prompt=4",
    "checkpoint.every=1",
    "tracking.live=plain",
    "policy.skip_zero_advantage=false",  # after so little SFT many a batch earns nothing: no pass would be left to test
)


@dataclass(frozen=True)
class Ctpo:
    """Starts `ctpo train configs/quickstart.yaml`, small, in a scratch directory."""

    directory: Path

    def command(self, *overrides: str, ranks: int = 1) -> list[str]:
        config = str(ROOT / "configs" / "quickstart.yaml")
        if ranks == 1:
            program = [sys.executable, "-m", "ctpo_megatron.train"]
        else:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            program = [sys.executable, *launcher, "-m", "ctpo_megatron.train"]
        return [*program, config, *SMALL, *overrides]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def launch(self, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """Run the command as a user does."""
        command = self.command(*overrides, ranks=ranks)
        return children.run(command, directory=self.directory, environment=self.environment, deadline_s=280)

    def train(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the same in a process that has imported everything."""
        arguments = self.command(*overrides)[3:]
        how = {"directory": self.directory, "environment": self.environment, "deadline_s": 280}
        return pool.prefork().run(train_main, arguments, **how)

    def train_until(self, text: str, *overrides: str) -> str:
        """Run until a line containing `text` appears, then kill -9 the whole process group; returns the output."""
        with self._running("killed", text, *overrides) as (process, log):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(scaled(30))
        return log.read_text()

    def train_disturbed(self, text: str, disturb: Callable[[int], None], *overrides: str) -> tuple[int | None, str]:
        """Run to the end, calling `disturb(process id)` once a line contains `text`; exit status and output."""
        with self._running("disturbed", text, *overrides) as (process, log):
            disturb(process.pid)
            return process.wait(scaled(200)), log.read_text()

    @contextlib.contextmanager
    def _running(self, name: str, text: str, *overrides: str) -> Iterator[tuple[Child, Path]]:
        """A run whose output has got to `text`."""
        log = self.directory / f"{name}.log"
        log.unlink(missing_ok=True)  # of an earlier run
        process = pool.prefork().start(
            train_main,
            self.command(*overrides)[3:],
            log,
            output=self.directory / name,
            directory=self.directory,
            environment=self.environment,
        )
        try:
            awaited(lambda: text in read(log) or process.wait(0.2) is not None, 200)
            yield process, log
        finally:
            process.end()


def train_main(arguments: list[str], log: Path | None = None) -> int:
    """`python -m ctpo_megatron.train`, with both outputs in one file if one is given."""
    from ctpo_megatron import cli

    time.tzset()  # the process was forked before its environment was set
    if log is not None:
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    return cli.main(["train", *arguments])


def read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A JSON-lines file of a run, or a dump of trajectories."""
    if name.endswith(".parquet"):
        return read_trajectories(run / name)
    return [json.loads(line) for line in (run / name).read_text().splitlines()]
