"""Wall and CPU seconds of phases and stages, and the progress of a run, which the heartbeat file has."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from ctpo_megatron.base.files import read_note, write_json
from ctpo_megatron.base.run_paths import RunPaths

log = logging.getLogger(__name__)


@dataclass(slots=True)
class TimeSpent:
    """Accumulated time. `cpu`: of this process, all threads; `cpu_all` adds engines, sandbox and scorers.

    `cpu_all` is measured for stages only: walking the process tree is too slow for the phases of a step.
    """

    wall: float = 0.0
    cpu: float = 0.0
    cpu_all: float = 0.0


class Progress:
    """Progress of one rank; any thread reads it.

    step: the latest logged step, RL or supervised; 0 before the first. on_advance: called at every progress.
    """

    def __init__(self) -> None:
        self.step = 0
        self.on_advance: Callable[[], None] = lambda: None
        self._within: list[str] = []
        self._advanced = time.monotonic()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter a stage or phase; they nest."""
        self._within.append(name)
        self.advance()
        try:
            yield
        finally:
            self._within.pop()
            self.advance()

    def advance(self) -> None:
        """Note that a part of a long phase is done."""
        self._advanced = time.monotonic()
        self.on_advance()

    @property
    def phase(self) -> str:
        """E.g. `rl/step/update`; empty between stages."""
        return "/".join(self._within)

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._advanced


class Phases:
    """Times phases within a step (`time/<phase>`) and stages of the run (`stages.json`); notes the progress of a rank.

    Both may nest and overlap. mark: a context that names a phase in a trace, while one is recorded (`run/trace.py`).
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        """With a run directory, stage totals are stored in its `stages.json` and continue in a resumed run."""
        self._path = RunPaths(Path(run_dir)).stages if run_dir else None
        self.stages: dict[str, TimeSpent] = read_stages(run_dir) if run_dir else {}
        self.progress = Progress()
        self.mark: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._step: dict[str, TimeSpent] = {}
        self._lock = threading.Lock()
        self._lap = (time.perf_counter(), time.process_time())

    def lap(self) -> TimeSpent:
        """Time since the last call, or since the creation."""
        now = (time.perf_counter(), time.process_time())
        spent = TimeSpent(now[0] - self._lap[0], now[1] - self._lap[1])
        self._lap = now
        return spent

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the current step, even if it raises."""
        measured = _measured(lambda spent: self._add(name, spent, self._step))
        with self.progress.within(name), measured, self.mark(f"time/{name}"):
            yield

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the run (start, kernels, sft, rl, ...), even if it raises."""
        try:
            measured = _measured(lambda spent: self._add(name, spent, self.stages), whole_tree=True)
            with self.progress.within(name), measured:
                yield
        finally:
            self._save()

    def advance(self) -> None:
        """Record progress within a long phase."""
        self.progress.advance()

    def metrics(self) -> dict[str, float]:
        """`time/<phase>` and `time/<phase>_cpu` of the step that ends now, in seconds; resets them."""
        with self._lock:
            step, self._step = self._step, {}
        walls = {f"time/{name}": spent.wall for name, spent in step.items()}
        return walls | {f"time/{name}_cpu": spent.cpu for name, spent in step.items()}

    def _add(self, name: str, spent: TimeSpent, totals: dict[str, TimeSpent]) -> None:
        with self._lock:
            seconds = totals.setdefault(name, TimeSpent())
            seconds.wall += spent.wall
            seconds.cpu += spent.cpu
            seconds.cpu_all += spent.cpu_all

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            write_json(self._path, {name: asdict(total) for name, total in self.stages.items()}, patient=False)
        except OSError as error:  # it may be why the run ends, which another error says
            log.warning("the times of the stages could not be written: %s", error)


def read_stages(run_dir: Path) -> dict[str, TimeSpent]:
    """Stage totals of a run directory in the order the stages ended; empty without a readable file."""

    def totals(stages: dict[str, dict[str, float]]) -> dict[str, TimeSpent]:
        return {name: TimeSpent(**total) for name, total in stages.items()}

    return read_note(RunPaths(Path(run_dir)).stages, totals, {}, "the times of earlier stages are lost")


@contextmanager
def _measured(report: Callable[[TimeSpent], None], whole_tree: bool = False) -> Iterator[None]:
    tree = _tree_cpu() if whole_tree else 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        spent = TimeSpent(time.perf_counter() - wall, time.process_time() - cpu)
        spent.cpu_all = max(_tree_cpu() - tree, spent.cpu) if whole_tree else 0.0
        report(spent)


def _tree_cpu() -> float:
    """CPU seconds of this process and its descendants, including ended ones that were waited for."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile; its parent has its time now
            total += sum(process.cpu_times()[:4])
    return total


@dataclass(frozen=True)
class Heartbeat:
    """Content of the file, written by rank zero every few seconds.

    state: `running`, or at the end `ended` or `failed`; a killed run stays `running`. phase: of rank zero, e.g.
    `rl/step/update`. time, progress: seconds since the epoch by rank zero's clock, of this write and of its latest
    progress. Progress is a phase that begins or ends, or a group of trajectories that is complete.
    """

    state: Literal["running", "ended", "failed"]
    step: int
    phase: str
    time: float
    progress: float
    ranks: int
    pid: int
    host: str

    def write(self, directory: Path) -> None:
        """Replace the file of a run directory atomically."""
        write_json(RunPaths(directory).heartbeat, asdict(self), patient=False)


def read_heartbeat(directory: Path) -> Heartbeat | None:
    """Return the heartbeat of a run directory; None when it has none yet or a damaged one."""
    return read_note(RunPaths(Path(directory)).heartbeat, lambda found: Heartbeat(**found), None, "no sign of life")
