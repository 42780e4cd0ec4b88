"""Limits how many turns an engine samples at once: earlier steps first, because the trainer waits for them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class TurnScheduler:
    """A queue of turns by step, for one event loop.

    A turn starts at once unless trajectories of an earlier step are in flight. Then at most `room` turns run
    concurrently, the others wait, and the earliest step starts first.

    Why: a step of an engine may take longer the more turns are in it. Two batches that share the engine equally then
    complete late and together. The trainer waits for the first batch and has the second before it needs it, and the
    engine idles. (vLLM's `scheduling_policy: priority` orders only requests beyond `max_num_seqs`.)
    """

    def __init__(self, room: int) -> None:
        self._room, self._running = room, 0
        self._in_flight: Counter[int] = Counter()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @contextmanager
    def trajectory(self, step: int) -> Iterator[None]:
        """Count one trajectory of `step` as in flight within the context."""
        self._in_flight[step] += 1
        try:
            yield
        finally:
            self._in_flight[step] -= 1
            self._in_flight += Counter()  # drops steps without trajectories
            self._begin()

    async def begin(self, step: int) -> None:
        """Wait until a turn of `step` may be sampled; the caller ends it by `end`. The wait can be cancelled."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (step, next(self._numbers), turn))
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was started just before, and its caller will not end it
                self.end()
            raise

    def end(self) -> None:
        """End a turn that was sampled or abandoned; the next one may start."""
        self._running -= 1
        self._begin()

    def _begin(self) -> None:
        """Start every queued turn that may run."""
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
