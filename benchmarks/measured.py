"""Runs a training command and measures its process tree at the end of each step: CPU-seconds by part, and memory.

A command says that a step is over by a line of JSON with the key `step` in a file. CPU-seconds are those of all
processes of the tree, ended ones included; what the rest of the machine used meanwhile is measured too. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ctpo_megatron.base.processes import wait_for

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S, _MEMORY_S = 0.02, 1.0
_TAIL = 2000

PARTS = {
    "ctpo_sandbox": "sandbox",
    "RolloutEngine": "engine actor",
    "multiprocessing.forkserver": "scorer",
    "/ray/": "Ray",
    "ray::": "Ray",
}
"""Text in a command line -> part. Others belong to the part of their parent; a command itself is the trainer."""
TRAINER = "trainer"
QUIET = 0.05
"""Share of the machine that others may use meanwhile for it to be called quiet."""


@dataclass
class Moment:
    """What had been used at the end of a step. cpu: CPU-seconds by part; machine: of all processes but this one."""

    step: int
    wall: float
    cpu: dict[str, float]
    machine: float


@dataclass
class Observed:
    """A command that has ended. peak_mib: most memory (PSS) of the tree at once; by part in `peak_of`."""

    moments: list[Moment]
    peak_mib: float
    peak_of: dict[str, float]
    lines: list[dict[str, Any]]


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, so that none leaves the tree. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def tree(root: psutil.Process) -> dict[psutil.Process, str]:
    """Every process below `root`, and its part."""
    found: dict[psutil.Process, str] = {}
    parts = {root.pid: TRAINER}
    for process in root.children(recursive=True):  # parents come before their children
        try:
            command, parent = " ".join(process.cmdline()), process.ppid()
        except psutil.ZombieProcess:  # its CPU-seconds count until it is reaped
            command, parent = "", root.pid
        except psutil.NoSuchProcess:
            continue
        found[process] = parts[process.pid] = part_of(command, parts.get(parent, TRAINER))
    return found


def part_of(command: str, of_parent: str) -> str:
    """The part that a process belongs to."""
    return next((part for text, part in PARTS.items() if text in command), of_parent)


def cpu_seconds(processes: Mapping[psutil.Process, str]) -> dict[str, float]:
    """CPU-seconds by part, those of ended and reaped children included."""
    total: Counter[str] = Counter()
    for process, part in processes.items():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total[part] += times.user + times.system + times.children_user + times.children_system
    return dict(total)


def memory_mib(processes: Mapping[psutil.Process, str]) -> dict[str, float]:
    """Memory (PSS) by part, in MiB."""
    total: Counter[str] = Counter()
    for process, part in processes.items():
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            pss = next((line for line in text.splitlines() if line.startswith("Pss:")), "Pss: 0")
            total[part] += int(pss.split()[1]) / 1024
    return dict(total)


def machine_busy() -> float:
    """CPU-seconds that the machine has worked since it started, this process left out."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return float(busy) - time.process_time()


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none when there is no file yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def watch(
    command: Sequence[str],
    marks: Path,
    log: Path,
    *,
    environment: Mapping[str, str],
    deadline_s: float,
    memory: bool = True,
    directory: Path | None = None,
) -> Observed:
    """Run the command to its end. All children of this process count as its tree.

    directory: the current one of the command; None: that of this process. memory: also look for its peak, once a
    second; that costs 4 % of two cores (AMD EPYC). Raises RuntimeError with the end of its log when it fails,
    TimeoutError after the deadline; then it is killed.
    """
    marks.unlink(missing_ok=True)
    root, began = psutil.Process(), time.monotonic()
    moments: list[Moment] = []
    peak: dict[str, float] = {}
    size, looked = 0, 0.0
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=directory,
            start_new_session=True,
        )
        try:
            over = False
            while not over:
                over = has_ended(process)  # looked at once more afterwards: a zombie still has its CPU-seconds
                if (now := time.monotonic()) - began > deadline_s:
                    raise TimeoutError(f"{' '.join(command[:4])} ... has not ended in {deadline_s:g} s; see {log}")
                if marks.exists() and marks.stat().st_size > size:
                    cpu, machine = cpu_seconds(tree(root)), machine_busy()
                    size = marks.stat().st_size
                    step = int(lines_of(marks)[-1]["step"])
                    moments.append(Moment(step, time.monotonic() - began, cpu, machine))
                if memory and now - looked > _MEMORY_S:
                    looked, used = now, memory_mib(tree(root))
                    peak = max(peak, used, key=lambda parts: sum(parts.values()))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
    if process.wait() != 0:
        raise RuntimeError(f"exit status {process.returncode}: {' '.join(command)}\n{log.read_text()[-_TAIL:]}")
    return Observed(moments, sum(peak.values()), peak, lines_of(marks))


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; without reaping it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def end_all(grace_s: float = 20.0) -> None:
    """Wait for all that is below this process, and kill what is left then: nothing of one run meets the next."""
    for process in wait_for(psutil.Process().children(recursive=True), grace_s):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def between(observed: Observed, first: int, last: int | None = None) -> dict[str, Any]:
    """Figures of the steps after `first`, up to `last` or the end: seconds, CPU-seconds by part, and of the others."""
    start = next(moment for moment in observed.moments if moment.step == first)
    end = next((moment for moment in observed.moments if moment.step == last), observed.moments[-1])
    parts = {part: end.cpu[part] - start.cpu.get(part, 0.0) for part in end.cpu}
    cpu = sum(parts.values())
    return {
        "steps": end.step - start.step,
        "wall": end.wall - start.wall,
        "cpu": cpu,
        "parts": parts,
        "others_cpu": end.machine - start.machine - cpu,
    }


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and least to most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quiet(runs: Sequence[Mapping[str, Any]]) -> str:
    """What the rest of the machine used meanwhile, as a sentence."""
    share = max(run["others_cpu"] / (run["wall"] * (os.cpu_count() or 1)) for run in runs)
    verdict = "quiet" if share <= QUIET else "not quiet"
    return f"The rest of the machine used at most {share:.1%} of it during any run: it was {verdict}."
