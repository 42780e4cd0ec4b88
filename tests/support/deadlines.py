"""Deadlines of tests, longer on a slow machine: `CTPO_TEST_SLOWNESS=4 make test` waits four times as long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

VARIABLE = "CTPO_TEST_SLOWNESS"
T = TypeVar("T")


def scaled(seconds: float) -> float:
    """`seconds` times the environment variable CTPO_TEST_SLOWNESS (default 1). Raises ValueError unless positive."""
    slowness = float(os.environ.get(VARIABLE, "1"))
    if not slowness > 0:
        raise ValueError(f"{VARIABLE}={slowness:g}: must be a positive number")
    return seconds * slowness


def awaited(asked: Callable[[], T], seconds: float, every: float = 0.05) -> T:
    """What `asked()` says once it is true; after `scaled(seconds)` its last answer, true or not."""
    deadline = time.monotonic() + scaled(seconds)
    while not (answer := asked()) and time.monotonic() < deadline:
        time.sleep(every)
    return answer
