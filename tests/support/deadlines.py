"""Deadlines of tests, stretched on slow or busy machines by one environment variable."""

from __future__ import annotations

import os


def scaled(seconds: float) -> float:
    """`seconds` times CTPO_TEST_SLOWNESS (default 1)."""
    return seconds * float(os.environ.get("CTPO_TEST_SLOWNESS", "1"))
