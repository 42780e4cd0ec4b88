"""What torchrun tells a process of the job that it is in."""

from __future__ import annotations

import os


def world_size() -> int:
    """Ranks of this job: WORLD_SIZE as torchrun sets it, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))
