"""Private memory of the processes of a run over time, and how fast it grows once they are warm."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import psutil

EVERY_S = 2.0
WARM_S = 60.0
"""Seconds of a start, at least: until then a trainer of 100 undisturbed steps grew to 500 MB, and stayed there."""
FEWEST = 20
"""Looks at a warm process without which a line through them says nothing."""
SHARE, MB = 0.02, 20.0
"""What the last third of a life may have more than the second: the larger of this share, and these megabytes."""


class Growth(NamedTuple):
    """Of one process. before, after: fitted megabytes after a quarter and three quarters of its time once warm."""

    name: str
    seconds: float
    before: float
    after: float

    @property
    def too_much(self) -> bool:
        return self.after - self.before > max(SHARE * self.before, MB)

    def __str__(self) -> str:
        return f"{self.name}: {self.before:.1f} -> {self.after:.1f} MB in {self.seconds:.0f} s"


def private_mb(process: psutil.Process) -> float:
    """Anonymous memory. The unique set size would lose all that a child shares that is forked to write a checkpoint."""
    info = process.memory_info()
    return float(info.rss - info.shared) / 1e6


class Watch:
    """A thread that looks at all descendants of a process, which may be another one later, until `close`."""

    def __init__(self, root: Callable[[], int | None]) -> None:
        self._root = root
        self._looks: dict[tuple[int, float, str], list[tuple[float, float]]] = defaultdict(list)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def growths(self, least_s: float) -> list[Growth]:
        """Of the processes that lived for `least_s` seconds at least."""
        return [
            fitted(name, looks)
            for (_, _, name), looks in self._looks.items()
            if looks[-1][0] - looks[0][0] >= least_s and sum(at >= _warm_from(looks) for at, _ in looks) >= FEWEST
        ]

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            if (root := self._root()) is None:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        self._look(process)

    def _look(self, process: psutil.Process) -> None:
        name = f"{process.name()} {' '.join(process.cmdline())[-60:]}"
        key = process.pid, process.create_time(), name
        self._looks[key].append((time.monotonic(), private_mb(process)))


def _warm_from(looks: list[tuple[float, float]]) -> float:
    """The first third of a life is a start, and `WARM_S` of a short one."""
    began, ended = looks[0][0], looks[-1][0]
    return began + max((ended - began) / 3, WARM_S)


def fitted(name: str, looks: list[tuple[float, float]]) -> Growth:
    """The line through those of the warm process. looks: (seconds, megabytes)."""
    at, mb = np.array(looks).T
    warm_from = _warm_from(looks)
    warm = at >= warm_from
    slope, base = np.polyfit(at[warm] - warm_from, mb[warm], 1)
    before, after = (float(base + slope * (at[-1] - warm_from) * part) for part in (1 / 4, 3 / 4))
    return Growth(name, float(at[-1] - at[0]), before, after)
