"""Threads of a process, by name."""

from __future__ import annotations

from pathlib import Path


def threads_named(pid: int, name: str) -> int:
    """How many there are."""
    found = [comm.read_text().strip() for comm in Path(f"/proc/{pid}/task").glob("*/comm")]
    return found.count(name)
