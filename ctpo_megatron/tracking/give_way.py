"""Lets other threads have the interpreter's lock while a thread works in the background."""

from __future__ import annotations

import time

AT_ONCE = 4_096
"""Tokens of work that hold the lock for about a millisecond."""
_PAUSE_S = 5e-5
"""Long enough that a thread which waits is woken and takes the lock."""


class GiveWay:
    """Counts work in tokens, and pauses after each `AT_ONCE`. The interpreter alone would switch every 5 ms."""

    def __init__(self) -> None:
        self._held = 0

    def after(self, tokens: int) -> None:
        """So much was done."""
        self._held += tokens
        if self._held >= AT_ONCE:
            self._held = 0
            time.sleep(_PAUSE_S)
