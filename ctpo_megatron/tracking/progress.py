"""Where a rank is: the stages and phases that it is in, and how long ago it began or ended one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Of one rank; its main thread writes, the watchdog's thread reads.

    step: the last one that was logged, of the RL or of the supervised steps; 0 before the first.
    """

    def __init__(self) -> None:
        self.step = 0
        self._within: list[str] = []
        self._advanced = time.monotonic()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Be in a stage or phase; they nest."""
        self._within.append(name)
        self.advance()
        try:
            yield
        finally:
            self._within.pop()
            self.advance()

    def advance(self) -> None:
        """Something was done: a part of a phase that may take long."""
        self._advanced = time.monotonic()

    @property
    def phase(self) -> str:
        """E.g. `rl/step/update`; empty between stages."""
        return "/".join(self._within)

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._advanced
