"""The queue that megatron's checkpoint writers report to."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from ctpo_megatron.base.signals import children_spared
from ctpo_sandbox.libc import die_with_parent


class _PickledQueue:
    """Megatron's queue of results, with values sent as bytes, so that its process need not import torch to unpickle."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue

    def put(self, results: Any) -> None:
        self._queue.put(pickle.dumps(results))

    def get_nowait(self) -> Any:
        try:
            return pickle.loads(self._queue.get_nowait())
        except EOFError as error:  # an OSError, as where it went before the connection was made
            raise ConnectionResetError(
                "the process that collects writers' results has ended; was it killed?"
            ) from error


def start_results_queue() -> None:
    """Start megatron's queue of results unless it is there: one process for all saves.

    It survives a signal to the whole job, and ends with this process. Raises EOFError or OSError where it does not
    start.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        with children_spared():
            manager.start(die_with_parent, (os.getpid(), signal.SIGKILL))
        filesystem_async._results_queue = _PickledQueue(manager.Queue())
