"""How often something that failed is tried again, and how long to wait before each attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries` further attempts after the first; delays in seconds double from `delay` up to `longest_delay`."""

    retries: int
    delay: float = 0.5
    longest_delay: float = 10.0

    def delay_s(self, failures: int) -> float:
        """Seconds to wait after that many failures (>= 1) in a row."""
        return min(self.longest_delay, self.delay * 2.0 ** (failures - 1))
