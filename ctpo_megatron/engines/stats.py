"""What a pool records: counts as the metrics `rollout/*` have them, and what its engines have in flight over time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ctpo_megatron.base import clock
from ctpo_megatron.data.tool_call import TOOL_STATUSES
from ctpo_megatron.engines.timeouts import OCCUPANCY_REPEAT_S, OCCUPANCY_ROW_S

log = logging.getLogger(__name__)

UPDATES_BY = "sync_by_"
"""Prefix of the counts of weight updates; the transport follows."""


def pool_stats(counts: Mapping[str, float]) -> dict[str, float]:
    """Every count of `EnginePool.stats`, absent ones as 0, and the rate of the weight updates where there were any."""
    names = ["group_retries", "late_groups", "quarantined", "engine_restarts", "sync_s", "sync_bytes"]
    names += [f"lost_{status}" for status in TOOL_STATUSES]
    stats = {name: float(counts.get(name, 0)) for name in names}
    stats |= {name: float(count) for name, count in counts.items() if name.startswith(UPDATES_BY)}
    if stats["sync_bytes"]:
        stats["sync_gb_per_s"] = stats["sync_bytes"] / 1e9 / stats["sync_s"]
    return stats


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
        """Add `trajectories`, which may be negative, to the number in flight on `engine`."""
        self._in_flight[engine] += trajectories

    def note(self, engines: int) -> None:
        """Write a row of the first `engines` engines when it has changed, or is old; called often."""
        row, now = tuple(self._in_flight[engine] for engine in range(engines)), clock.now()
        # Written at once: the next call may follow a whole training step later, and the old row would stay until then.
        turned = any(row) != any(self._row)
        if not turned and now < self._written + (OCCUPANCY_ROW_S if row != self._row else OCCUPANCY_REPEAT_S):
            return
        self._row, self._written = row, now
        try:
            self._append(",".join([f"{now:.2f}", *map(str, row)]) + "\n")
        except OSError as error:  # a run does not stop for a figure of its report
            if not self._failed:
                log.warning("what engines have in flight cannot be written, the report will lack it: %s", error)
            self._failed = True

    def _append(self, line: str) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="ascii") as file:
            file.write(line)
