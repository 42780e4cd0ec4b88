"""Writes dumps of trajectories in the background: a thread, a bounded queue, and errors that are raised later."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

WAITING = 2
"""Limit of dumps that are queued or being written: each holds the trajectories of a step in memory."""
DEADLINE_S = 600.0


class DumpError(RuntimeError):
    """A dump was not written; the message names step and reason."""


class DumpWriter:
    """Calls functions that write dumps, one after another, in its own thread.

    A function that fails or does not end within `DEADLINE_S` raises DumpError from the next call of any method.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dumps")
        self._pending: deque[tuple[str, Future[Path]]] = deque()
        self._lock, self._cpu_s = threading.Lock(), 0.0

    def wait(self) -> None:
        """Return when fewer than `WAITING` dumps are unfinished."""
        while self._pending and (len(self._pending) >= WAITING or self._pending[0][1].done()):
            self._take()

    def put(self, name: str, write: Callable[[], Path]) -> None:
        """Queue a call of `write`, after a `wait`. name: for messages."""
        self.wait()
        self._pending.append((name, self._thread.submit(self._measured, write)))

    def flush(self) -> None:
        """Return when everything is on disk."""
        while self._pending:
            self._take()

    def take_cpu_s(self) -> float:
        """CPU seconds of the thread since the last call."""
        with self._lock:
            spent, self._cpu_s = self._cpu_s, 0.0
        return spent

    def close(self) -> None:
        """Write the rest; failures are logged, because another exception may be propagating."""
        try:
            self.flush()
        except DumpError as error:
            log.error("%s", error)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _measured(self, write: Callable[[], Path]) -> Path:
        began = time.thread_time()
        try:
            return write()
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - began

    def _take(self) -> None:
        name, future = self._pending.popleft()
        try:
            future.result(DEADLINE_S)
        except TimeoutError as error:
            raise DumpError(f"{name} is not written after {DEADLINE_S:g} s: is the file system there?") from error
        except Exception as error:
            raise DumpError(f"{name} could not be written: {error}") from error
