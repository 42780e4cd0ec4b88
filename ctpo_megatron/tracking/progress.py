"""Progress of a rank: its current stages and phases, and the time since one began or ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Progress of one rank; its main thread writes, the watchdog's thread reads.

    step: the latest logged step, RL or supervised; 0 before the first.
    """

    def __init__(self) -> None:
        self.step = 0
        self._within: list[str] = []
        self._advanced = time.monotonic()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter a stage or phase; they nest."""
        self._within.append(name)
        self.advance()
        try:
            yield
        finally:
            self._within.pop()
            self.advance()

    def advance(self) -> None:
        """Note that a part of a long phase is done."""
        self._advanced = time.monotonic()

    @property
    def phase(self) -> str:
        """E.g. `rl/step/update`; empty between stages."""
        return "/".join(self._within)

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._advanced
