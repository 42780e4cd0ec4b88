"""A pool of pebble's processes that notices when they are gone or frozen: pebble forgets tasks of a pool that broke."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from pebble import ProcessFuture, ProcessPool

T = TypeVar("T")
START_TIMEOUT_S = 120.0  # for all workers to start and load the reward functions
WORKERS_POLL_S = 1.0  # how often a waiting thread checks that the workers are still there
WORKERS_RETRIES = 3  # how often work is given to new workers because all of them were gone

log = logging.getLogger(__name__)


class RewardWorkersLost(RuntimeError):
    """The processes that score do not come up, or die again and again; another machine may let them live."""


class Workers:
    """A pool of pebble's, and when one of its tasks ended last: a worker that is frozen while idle ends none.

    It keeps the others from tasks, and pebble's deadline begins with a task.
    """

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self._lock, self._pending, self._moved = threading.Lock(), 0, time.monotonic()
        self.frozen = False

    def schedule(self, function: Callable[..., T], arguments: tuple[Any, ...], limit_s: float) -> ProcessFuture[T]:
        """Raises RuntimeError when the pool is broken. limit_s: after which a worker is killed."""
        future: ProcessFuture[T] = self.pool.schedule(function, args=arguments, timeout=limit_s)
        with self._lock:
            self._moved = self._moved if self._pending else time.monotonic()
            self._pending += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: object) -> None:
        with self._lock:
            self._moved = time.monotonic()
            self._pending -= 1

    def active(self, patience_s: float) -> bool:
        """Whether results can be expected: one came within this time, or there was nothing to do."""
        with self._lock:
            idle_s = time.monotonic() - self._moved if self._pending else 0.0
        if idle_s > patience_s and not self.frozen:
            self.frozen = True
            log.warning("no reward worker did anything for %.0f s, was one of them frozen? They are replaced", idle_s)
        return not self.frozen and bool(self.pool.active)

    def stop(self) -> None:
        """Kill the processes; what they were to do is lost."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()


def awaited(future: ProcessFuture[T], workers: Workers, patience_s: float, until: float = math.inf) -> T:
    """The result of a future; a broken pool forgets its tasks. until: monotonic seconds.

    Raises the worker's exception, BrokenProcessPool when no worker is left, or TimeoutError.
    """
    while not wait([future], WORKERS_POLL_S).done:
        if not workers.active(patience_s) and not future.done():
            raise BrokenProcessPool("the workers are gone, and the result with them")
        if time.monotonic() > until:
            raise FutureTimeoutError("no reward worker answered")
    result: T = future.result()
    return result
