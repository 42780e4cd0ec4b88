"""The time of day, which a user may set during a run; durations are measured with `time.monotonic`."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds since the epoch."""
    return time.time()
