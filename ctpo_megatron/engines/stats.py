"""What a pool counts and times, as the metrics `rollout/*` have it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ctpo_megatron.data.tool_call import TOOL_STATUSES


def pool_stats(counts: Mapping[str, float]) -> dict[str, float]:
    """Every count of `EnginePool.stats`, absent ones as 0, and the rate of the weight updates where there were any."""
    names = ["group_retries", "late_groups", "quarantined", "engine_restarts", "sync_s", "sync_bytes"]
    names += [f"lost_{status}" for status in TOOL_STATUSES]
    stats = dict.fromkeys(names, 0.0) | {name: float(count) for name, count in counts.items()}
    if stats["sync_bytes"]:
        stats["sync_gb_per_s"] = stats["sync_bytes"] / 1e9 / stats["sync_s"]
    return stats


class PoolStats:
    """Counts and seconds since they were taken last."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._sync_s = self._idle_s = 0.0
        self._load = Counter[int]()
        self._load_since: dict[int, float] = {}
        self._taken = time.monotonic()

    def add_update(self, transport: str, size: int, seconds: float) -> None:
        """Add a weight update of `size` bytes to each engine."""
        self.counts.update({"sync_bytes": size, f"sync_by_{transport}": 1})
        self._sync_s += seconds

    def note_load(self, engine: int, samples: int) -> None:
        """Record that an engine samples more trajectories, or fewer."""
        now = time.monotonic()
        if not self._load[engine]:
            self._idle_s += now - max(self._taken, self._load_since.get(engine, 0.0))
        self._load[engine] += samples
        self._load_since[engine] = now

    def take(self, engines: int) -> dict[str, float]:
        """Return the counts and seconds, and reset them.

        Always group_retries, late_groups, quarantined (prompts), engine_restarts, and engines_idle, the share of the
        time in which an engine has nothing to sample, mean over engines. After a sync also sync_s, sync_bytes (of one
        engine), sync_gb_per_s and sync_by_<transport> (updates). The lost_<status> are tool calls of discarded
        attempts, which appear in no trajectory.
        """
        for engine in range(engines):
            self.note_load(engine, 0)
        now = time.monotonic()
        idle = min(1.0, self._idle_s / max(1e-9, (now - self._taken) * max(1, engines)))
        stats = pool_stats({**self.counts, "sync_s": self._sync_s, "engines_idle": idle})
        self.counts.clear()
        self._taken, self._sync_s, self._idle_s = now, 0.0, 0.0
        return stats
