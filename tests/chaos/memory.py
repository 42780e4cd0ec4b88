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
FEWEST = 20
"""Looks at a process without which a line through them says nothing."""
SHARE, MB = 0.02, 20.0
"""What the last third of a life may have more than the second: the larger of this share, and these megabytes."""


class Growth(NamedTuple):
    """Of one process. before, after: fitted megabytes in the middle of the second and of the last third of its life."""

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
            if len(looks) >= FEWEST and looks[-1][0] - looks[0][0] >= least_s
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


def fitted(name: str, looks: list[tuple[float, float]]) -> Growth:
    """looks: (seconds, megabytes). The line through those of the last two thirds, as the first is of a start."""
    at, mb = np.array(looks).T
    began, lived = at[0], at[-1] - at[0]
    warm = at >= began + lived / 3
    slope, base = np.polyfit(at[warm] - began, mb[warm], 1)
    before, after = (float(base + slope * lived * part) for part in (1 / 2, 5 / 6))
    return Growth(name, float(lived), before, after)
