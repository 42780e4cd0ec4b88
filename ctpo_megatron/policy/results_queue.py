"""The queue that megatron's checkpoint writers report to, and the process that keeps it."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from multiprocessing.managers import SyncManager
from multiprocessing.process import BaseProcess
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from ctpo_megatron.base.signals import children_spared
from ctpo_sandbox.libc import die_with_parent

log = logging.getLogger(__name__)

_STARTS = 3
"""Attempts to start the process, which something may kill or freeze meanwhile."""
_START_S = 120.0
"""For one attempt; it takes a second or two."""


class _PickledQueue:
    """Megatron's queue of results, with values sent as bytes, so that its process need not import torch to unpickle."""

    def __init__(self, queue: Any, process: BaseProcess) -> None:
        self._queue, self.process = queue, process

    def put(self, results: Any) -> None:
        self._queue.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        try:
            return pickle.loads(self._queue.get_nowait())
        except EOFError as error:  # an OSError, as where it went before the connection was made
            raise ConnectionResetError(
                "the process that collects writers' results has ended; was it killed?"
            ) from error


def start_results_queue() -> str:
    """Start the queue that megatron's writers report to, unless it is there: one process for all saves.

    It survives a signal to the whole job, and ends with this process. Returns why it could not be started, or "".
    """
    queue = filesystem_async._results_queue
    if isinstance(queue, _PickledQueue):
        if queue.process.is_alive():
            return ""
        log.warning("the process that collects what checkpoint writers report is gone, was it killed? Another starts")
    reason = ""
    for attempt in range(1, _STARTS + 1):
        try:
            filesystem_async._results_queue = _started()
            return ""
        except (EOFError, OSError) as error:  # EOFError: it ended before it had said its address
            reason = f"{type(error).__name__}: {error}".removesuffix(": ")
            log.warning("the process that collects writers' reports did not start (attempt %d: %s)", attempt, reason)
    return (
        f"the process that collects what checkpoint writers report did not start in {_STARTS} attempts ({reason}): "
        "is something killing the processes of this run, or is their number limited?"
    )


def _started() -> _PickledQueue:
    """Raises EOFError and OSError."""
    others = multiprocessing.active_children()

    def started() -> list[BaseProcess]:
        # Not what other threads start meanwhile, as reward workers.
        kind = f"{SyncManager.__name__}-"
        return [child for child in multiprocessing.active_children() if child not in others and kind in child.name]

    def end_frozen() -> None:
        for child in started():
            log.warning("%s has not answered for %g s, and is killed", child.name, _START_S)
            child.kill()

    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    late = threading.Timer(_START_S, end_frozen)  # multiprocessing itself waits for ever
    late.start()
    try:
        with children_spared():
            manager.start(die_with_parent, (os.getpid(), signal.SIGKILL))
        return _PickledQueue(manager.Queue(), *started())
    finally:
        late.cancel()
        for child in started():
            # At exit multiprocessing would wait forever for a queue that was interrupted during its start.
            atexit.register(child.kill)
