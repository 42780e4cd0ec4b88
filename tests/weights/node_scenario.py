"""A receiver in a process of its own that claims a bucket and stalls."""

from __future__ import annotations

import signal
from pathlib import Path

from ctpo_megatron.engines.weights.node_memory import meet


def claim(meeting: str, sizes: list[int], numbers: list[int], claimed: Path) -> int:
    """Claim these buckets; exit status 1 where another has them."""
    memory = meet(meeting, sizes, 2)
    if not all(memory.claim(number) for number in numbers):
        return 1
    claimed.touch()
    signal.pause()
    return 0
