"""Writes dumps in a thread of its own, while training continues."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ctpo_megatron.base.files import patiently

log = logging.getLogger(__name__)

FAILURES = "tracking/dump_failures"
WAITING = 2
"""Limit of dumps that are queued or being written: each holds the trajectories of a step in memory."""
DEADLINE_S = 600.0


class DumpWriter:
    """Calls functions that write dumps, one after another, in its own thread.

    A dump that cannot be written is logged and counted, and nothing else: training needs none. After one that does not
    end within `DEADLINE_S`, as on a file system that hangs, further dumps are skipped until it has ended.
    """

    def __init__(self) -> None:
        # Now and by the caller: an import in the thread would keep others from the interpreter's lock.
        import ctpo_megatron.tracking.trajectories  # noqa: F401

        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dumps")
        self._pending: deque[tuple[str, Future[Path]]] = deque()
        self._stuck: Future[Path] | None = None
        self._failures = 0
        self._lock, self._cpu_s = threading.Lock(), 0.0

    def wait(self) -> None:
        """Return when fewer than `WAITING` dumps are unfinished."""
        while self._pending and (len(self._pending) >= WAITING or self._pending[0][1].done()):
            self._take()

    def put(self, name: str, write: Callable[[], Path]) -> None:
        """Queue a call of `write`, after a `wait`. name: for messages."""
        self.wait()
        if self._stuck is not None and not self._stuck.done():
            self._fail(name, "an earlier one still is not written")
        else:
            self._pending.append((name, self._thread.submit(self._measured, write)))

    def flush(self) -> None:
        """Return when everything is on disk that can be written."""
        while self._pending:
            self._take()

    def take_cpu_s(self) -> float:
        """CPU seconds of the thread since the last call."""
        with self._lock:
            spent, self._cpu_s = self._cpu_s, 0.0
        return spent

    def take_failures(self) -> int:
        """Dumps since the last call that are known to be lost."""
        lost, self._failures = self._failures, 0
        return lost

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _measured(self, write: Callable[[], Path]) -> Path:
        began = time.thread_time()
        try:
            return patiently(write, None)
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - began

    def _take(self) -> None:
        name, future = self._pending.popleft()
        try:
            future.result(DEADLINE_S)
        except TimeoutError as error:
            if future.done():  # it was raised in there
                self._fail(name, error)
                return
            self._stuck = future
            self._fail(name, f"not within {DEADLINE_S:g} s: is the file system there?")
            while self._pending:
                waiting, queued = self._pending.popleft()
                queued.cancel()
                self._fail(waiting, "an earlier one still is not written")
        except OSError as error:
            self._fail(name, error)
        except Exception as error:
            log.exception("%s could not be written", name)  # not of the disk: where it failed tells more
            self._fail(name, repr(error))

    def _fail(self, name: str, why: object) -> None:
        self._failures += 1
        log.error("%s could not be written, and training continues: %s", name, why)
