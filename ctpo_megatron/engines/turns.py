"""Limits concurrent turns of an engine: turns of an earlier step first, because the trainer waits for them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class TurnScheduler:
    """Turns of the earliest step in flight are always admitted. Turns of later steps wait while `room` turns are
    running, and are then admitted in the order of their steps.

    If more concurrent turns make each of them slower, an engine that is shared equally by two batches completes both
    late. The trainer then waits for the first batch, and the engine idles after the second. (vLLM's
    `scheduling_policy: priority` only orders requests beyond `max_num_seqs`.) For one event loop.
    """

    def __init__(self, room: int) -> None:
        self._room, self._running = room, 0
        self._in_flight: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @contextmanager
    def trajectory(self, step: int) -> Iterator[None]:
        """Context in which a trajectory of `step` is in flight."""
        self._in_flight[step] += 1
        try:
            yield
        finally:
            self._in_flight[step] -= 1
            self._in_flight += Counter()  # forgets steps without any
            self._begin()

    async def begin(self, step: int) -> None:
        """Wait until a turn of `step` may be sampled; call `end` after it. The wait can be cancelled."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (step, next(self._numbers), turn))
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.end()
            raise

    def end(self) -> None:
        """A turn was sampled, or will not be."""
        self._running -= 1
        self._begin()

    def _begin(self) -> None:
        """All turns that may."""
        while self._waiting:
            step, _, turn = self._waiting[0]
            if turn.cancelled():
                heapq.heappop(self._waiting)
                continue
            if self._running >= self._room and any(earlier < step for earlier in self._in_flight):
                return
            heapq.heappop(self._waiting)
            self._running += 1
            turn.set_result(None)
