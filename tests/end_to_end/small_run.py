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

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "sft.steps=40",
    "run.steps=3",
    "prepare.train_prompts=64",
    "prepare.heldout_prompts=16",
    "prepare.sft_conversations=640",
    "prepare.tokenizer_conversations=400",
    "rollout.prompts_per_step=4",
    "policy.mini_batch_prompts=2",
    "rollout.samples_per_prompt=4",
    "checkpoint.every=1",
    "tracking.live=plain",
)

NOT_REPEATED = (
    "time/",
    "throughput/",
    "memory/",
    "tokens/per_second",
    "rollout/generate_s",
    "rollout/sync_s",
    "sandbox/wall_mean_s",
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
        paths = [str(ROOT), *(str(ROOT / folder) for folder in ("kernels", "sandbox", "launchers"))]
        return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def train(self, *overrides: str, ranks: int = 1, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*overrides, ranks=ranks),
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def train_until(self, text: str, *overrides: str, timeout: float = 200) -> str:
        """Run until a line containing `text` appears, then kill -9 the whole process group; returns the output."""
        with self._running("killed.log", text, *overrides, timeout=timeout) as (process, log):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)
        return log.read_text()

    def train_disturbed(self, text: str, disturb: Callable[[int], None], *overrides: str) -> tuple[int, str]:
        """Run to the end, calling `disturb(process id)` once a line contains `text`; exit status and output."""
        with self._running("disturbed.log", text, *overrides, timeout=200) as (process, log):
            disturb(process.pid)
            return process.wait(timeout=200), log.read_text()

    @contextlib.contextmanager
    def _running(
        self, name: str, text: str, *overrides: str, timeout: float
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A run whose output has got to `text`."""
        log = self.directory / name
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*overrides),
                cwd=self.directory,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                deadline = time.monotonic() + timeout
                while text not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.2)
                yield process, log
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=30)


def repeatable(record: dict[str, float]) -> dict[str, float]:
    """The metrics of a step that the same run gives again."""
    return {name: value for name, value in record.items() if not name.startswith(NOT_REPEATED)}


def records(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """A JSON-lines file of a run."""
    return [json.loads(line) for line in (run / name).read_text().splitlines()]
