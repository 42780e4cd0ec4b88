"""Runs a stage: a process group of its own, a deadline, a log, and one record at the end whatever happened."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from benchmarks.gpu_first_hour.stages import Stage

Status = Literal["passed", "failed", "over its limit", "interrupted", "skipped"]
_GRACE_S = 10.0
_POLL_S = 0.2
_LINES = 24


@dataclass(frozen=True)
class Record:
    """What became of a stage; one line of the results. seconds: wall time. tail: the end of the log of a failure."""

    stage: str
    status: Status
    seconds: float
    commit: str
    detail: str = ""
    figures: Any = None
    tail: tuple[str, ...] = ()

    def line(self) -> str:
        """As JSON, without what is empty."""
        return json.dumps({name: value for name, value in asdict(self).items() if value not in ("", None, ())})


class Interrupt:
    """Whether Ctrl-C was pressed. Not an Event: its lock may be held by the wait that the signal interrupts."""

    seen = False

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """For `signal.signal`."""
        self.seen = True


def run_stage(
    stage: Stage, log: Path, root: Path, commit: str, interrupted: Interrupt, *, left_s: float, site: Path | None
) -> Record:
    """Run a stage to its end, to its limit, or until Ctrl-C; its record says which.

    left_s: of the budget for all stages. site: folder with further packages.
    """
    if stage.skip:
        return Record(stage.name, "skipped", 0.0, commit, stage.skip)
    if left_s <= 0 or left_s < stage.expected_s:
        left = f"takes about {stage.expected_s:g} s, and {max(0.0, left_s):.0f} s are left of --budget-s"
        return Record(stage.name, "skipped", 0.0, commit, left)
    if stage.figures is not None:
        stage.figures.unlink(missing_ok=True)
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                stage.command,
                cwd=root,
                env=os.environ | _paths(root, site) | stage.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Record(stage.name, "failed", 0.0, commit, str(error))
        status, detail = _wait(process, min(stage.limit_s, left_s), interrupted)
    seconds = round(time.monotonic() - begin, 1)
    tail = () if status == "passed" else tuple(log.read_text(errors="replace").splitlines()[-_LINES:])
    figures, problem = _figures(stage.figures)
    return Record(stage.name, status, seconds, commit, "; ".join(filter(None, (detail, problem))), figures, tail)


def _paths(root: Path, site: Path | None) -> dict[str, str]:
    """So that a checkout runs without being installed: machines that are lent bring their own torch."""
    folders = [str(root), *(str(root / name) for name in ("answers", "kernels", "sandbox", "launchers"))]
    folders += [str(site)] if site is not None else []
    return {"PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _wait(process: subprocess.Popen[bytes], limit_s: float, interrupted: Interrupt) -> tuple[Status, str]:
    deadline = time.monotonic() + limit_s
    try:
        while (status := process.poll()) is None:
            if interrupted.seen:
                return "interrupted", "Ctrl-C"
            if time.monotonic() > deadline:
                return "over its limit", f"ended after {limit_s:.3g} s"
            time.sleep(_POLL_S)
    finally:
        _end(process)
    return ("passed", "") if status == 0 else ("failed", f"exit status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: politely first, because an engine that is killed keeps the GPU's memory for a while."""
    for number, grace in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)


def _figures(path: Path | None) -> tuple[Any, str]:
    """The JSON in a file, of several lines the last one; and what is wrong with it."""
    if path is None:
        return None, ""
    if not path.exists():
        return None, f"{path.name} was not written"
    text = path.read_text()
    try:
        return json.loads(text.splitlines()[-1] if path.suffix == ".jsonl" else text), ""
    except (json.JSONDecodeError, IndexError) as error:
        return None, f"{path.name} is not JSON: {error}"
