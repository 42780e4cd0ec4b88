"""Counts of the pool and of what is scheduled on it, as the metrics `rollout/*` have them."""

from __future__ import annotations

from collections.abc import Mapping

from ctpo_megatron.data.trajectory import TOOL_STATUSES

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
