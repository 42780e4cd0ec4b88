"""What torchrun and the system tell a process of the job that it is in."""

from __future__ import annotations

import os


def world_size() -> int:
    """Ranks of this job: WORLD_SIZE as torchrun sets it, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def available_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def node_ranks() -> int | None:
    """Ranks of this job on this node: LOCAL_WORLD_SIZE as torchrun sets it; None without torchrun."""
    found = os.environ.get("LOCAL_WORLD_SIZE")
    return None if found is None else int(found)
