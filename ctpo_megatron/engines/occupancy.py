"""How busy each engine is over time: rows of a file that the report draws."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path

log = logging.getLogger(__name__)

_EVERY_S = 0.25
_STILL_S = 10.0
"""A row that says the same as the one before tells a long group from a run that has ended."""


class Occupancy:
    """Appends `seconds since the epoch, trajectories of engine 0, of engine 1, ...` to a file when that changes.

    A trajectory is in flight until its group is complete.
    """

    def __init__(self, path: Path) -> None:
        """path: `tracking.engine_occupancy` reads it. Created with the first row."""
        self._path = path
        self._in_flight: Counter[int] = Counter()
        self._row: tuple[int, ...] = ()
        self._written = 0.0
        self._failed = False

    def add(self, engine: int, trajectories: int) -> None:
        """Add to, or subtract from, the trajectories in flight."""
        self._in_flight[engine] += trajectories

    def note(self, engines: int) -> None:
        """Write what the first `engines` engines have in flight, if it changed; called often."""
        row, now = tuple(self._in_flight[engine] for engine in range(engines)), time.time()
        idle_now = not any(row) and row != self._row  # else a stale value would remain for a whole training step
        if not idle_now and now < self._written + (_EVERY_S if row != self._row else _STILL_S):
            return
        self._row, self._written = row, now
        try:
            self._append(",".join([f"{now:.2f}", *map(str, row)]) + "\n")
        except OSError as error:  # a figure of the report is not worth a run
            if not self._failed:
                log.warning("what engines have in flight cannot be written, the report will lack it: %s", error)
            self._failed = True

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(line)
