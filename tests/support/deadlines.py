"""Deadlines of tests, longer on a slow machine: `CTPO_TEST_SLOWNESS=4 make test` waits four times as long."""

from __future__ import annotations

import os

VARIABLE = "CTPO_TEST_SLOWNESS"


def scaled(seconds: float) -> float:
    """`seconds` times the environment variable CTPO_TEST_SLOWNESS (default 1). Raises ValueError unless positive."""
    slowness = float(os.environ.get(VARIABLE, "1"))
    if not slowness > 0:
        raise ValueError(f"{VARIABLE}={slowness:g}: must be a positive number")
    return seconds * slowness
