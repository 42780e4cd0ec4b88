"""Calls in worker processes that are killed when they take too long, and replaced where they are gone."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

RETRIES = 4
"""How often calls are given to new workers because the others were gone."""
_POLL_S = 1.0
"""How often it is checked that the workers are still there."""
T = TypeVar("T")

log = logging.getLogger(__name__)


class RewardWorkersLost(RuntimeError):
    """The processes that score do not come up, or die again and again; another machine may let them live."""


class Workers:
    """A pool of pebble's, replaced where it breaks: it does when an idle process ends, and forgets its tasks.

    make: starts the processes. patience_s: for any call to end while some wait. An idle worker that is frozen, or
    killed as it takes a task, keeps the others from tasks, and pebble's deadline begins with a task.
    """

    def __init__(self, make: Callable[[], ProcessPool], patience_s: float) -> None:
        self._make, self.patience_s = make, patience_s
        self._pool, self._moved, self._started = make(), 0.0, False
        self._lock, self._closed = threading.Lock(), False

    async def call(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], limit_s: float, again: int
    ) -> list[T | BaseException]:
        """Return what each call of the function returned or raised; TimeoutError after `limit_s` at work.

        again: how often a call that ended its process is repeated before the result is ProcessExpired: perhaps
        something else has killed it. Raises RewardWorkersLost when the workers are gone again and again.
        """
        found: dict[int, T | BaseException] = {}
        died, lost = Counter[int](), ""
        pool, renewals = self._pool, 0
        while left := [number for number in range(len(calls)) if number not in found]:
            if lost:
                if renewals == RETRIES:
                    times = f"{renewals + 1} times"
                    raise RewardWorkersLost(f"the reward workers {lost}, {times}; is something killing them?")
                renewals += 1
                self._renew(pool, lost)
            pool, futures = self._pool, dict[int, ProcessFuture[T]]()
            try:
                for number in left:
                    futures[number] = pool.schedule(function, args=calls[number], timeout=limit_s)
                lost = await self._await(futures.values(), pool)
            except RuntimeError as error:  # also of a new pool whose processes, or their fork server, were killed
                lost = "were killed" if self._started else f"did not start ({error!r})"
            for number, future in futures.items():
                problem = future.exception() if future.done() else BrokenProcessPool()
                if isinstance(problem, BrokenProcessPool):
                    lost = lost or "were killed"
                elif isinstance(problem, ProcessExpired) and died[number] < again:
                    died[number] += 1
                else:
                    found[number] = future.result() if problem is None else problem
        return [found[number] for number in range(len(calls))]

    def run(
        self, function: Callable[..., T], calls: Sequence[tuple[Any, ...]], limit_s: float, again: int
    ) -> list[T | BaseException]:
        """As `call`, in a thread that runs no event loop; one that it has stays what it is."""
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(self.call(function, calls, limit_s, again))

    async def _await(self, futures: Collection[ProcessFuture[T]], pool: ProcessPool) -> str:
        """Wait for all results; returns "", or why some will not come."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        left, began = len(futures), time.monotonic()

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                ended.set()

        def note(_: object) -> None:
            self._moved, self._started = time.monotonic(), True
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(count)

        for future in futures:
            future.add_done_callback(note)
        while left:
            idle_s = time.monotonic() - max(began, self._moved)
            if idle_s > self.patience_s:
                return f"did nothing for {idle_s:.0f} s, as if one of them were frozen"
            if not pool.active:
                return "were killed"
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _POLL_S)
        return ""

    def _renew(self, gone: ProcessPool, why: str) -> None:
        """Replace a pool, unless another call has done so."""
        with self._lock:
            if self._closed:
                raise RewardWorkersLost("the reward workers were stopped")
            if gone is self._pool:
                log.warning("the reward workers %s; they are replaced", why)
                self._stop()
                self._pool, self._started = self._make(), False

    def _stop(self) -> None:
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join()

    def close(self) -> None:
        """Kill the processes; what they were to do is lost. Idempotent."""
        with self._lock:
            self._closed = True
            self._stop()
