"""Rank zero acts alone or commands the others, which wait for it; ranks that do not come are named.

A collective of the training cannot do this: its deadline is meant for an exchange of tensors, and sampling a batch
takes longer. That a rank has died while rank zero acts is torchrun's to notice: it ends the job.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
logger = logging.getLogger(__name__)

_UNTIL_CALLED = timedelta(days=365)
"""For a rank that waits for rank zero: the one wait without a deadline of its own."""
_TRAVEL = timedelta(minutes=1)
"""For a result to reach all ranks, which are there by then."""
_AFTER_FAILURE = timedelta(seconds=20)
"""Ranks that live come within this time to hear of a failure, or to say that they are not the cause of one."""


class RankZeroError(RuntimeError):
    """Rank zero failed and reports the cause itself; this rank stops too. The message is one line.

    __cause__: what rank zero raised, if it can be sent.
    """


class RankLost(RuntimeError):
    """Another rank of the job died or hangs; the message names it."""


class RankZero:
    """What rank zero does for all; one per rank, which all ranks of the job create and call in the same order.

    Ranks meet in a barrier of gloo that knows who is missing, then the result is broadcast.
    """

    def __init__(self, timeout: timedelta) -> None:
        """timeout: how long rank zero waits for the other ranks when it has a result for them."""
        self.rank, self._size, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        # gloo's barrier takes a limit from rank zero only: the others wait as long as their group allows.
        self._waiting = dist.new_group(backend="gloo", timeout=_UNTIL_CALLED)
        self._results = dist.new_group(backend="gloo", timeout=_TRAVEL)
        self.names: list[str] = [""] * self._size
        dist.all_gather_object(self.names, f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})")

    def run(self, action: Callable[[], T]) -> T:
        """Run `action` on rank zero; every rank returns its result, which is pickled.

        There is no deadline except the action's own. When it raises, so does rank zero, and the others raise
        RankZeroError. Raises RankLost when a rank is gone or does not come in time.
        """
        if self.rank != 0:
            return self._receive()  # type: ignore[no-any-return] # what rank zero pickled
        try:
            result = action()
            content = pickle.dumps(("", result, None))
        except Exception as error:
            self._tell(error)
            raise
        self._send(content, self._timeout)
        return result

    @contextmanager
    def lost_ranks_named(self) -> Iterator[None]:
        """Within, a collective that fails because a rank is lost raises RankLost on rank zero; every rank enters it.

        The ranks that live meet once more after the failure: who does not come is lost. When all come, what failed is
        raised as it is.
        """
        try:
            yield
        except (RankZeroError, RankLost):
            raise
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "/gloo/" in str(error):
                self._meet(self._results, _AFTER_FAILURE)
            raise

    def _tell(self, error: Exception) -> None:
        """Have the other ranks raise RankZeroError; those that do not come soon learn it by losing rank zero."""
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        try:
            self._send(pickle.dumps((first, None, _portable(error))), _AFTER_FAILURE)
        except RankLost as lost:
            logger.warning("the other ranks do not know of the failure: %s", lost)

    def _send(self, content: bytes, timeout: timedelta) -> None:
        self._meet(self._waiting, timeout)
        self._broadcast([content])

    def _receive(self) -> Any:
        self._meet(self._waiting, _UNTIL_CALLED)
        box: list[Any] = [None]
        self._broadcast(box)
        problem, result, cause = pickle.loads(box[0])
        if problem:
            raise RankZeroError(f"rank {self.rank} stops, rank 0 failed: {problem}") from cause
        return result

    def _meet(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        """Return when every rank has come. timeout: rank zero's; the others have the group's.

        Raises RankLost, which names all ranks that have not come on rank zero, and rank zero on the others.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        try:
            dist.monitored_barrier(group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            what = "gone; the cause is in the log of that rank"
            if time.monotonic() >= deadline:
                within = f"within {timeout.total_seconds():g} s"
                what = f"no answer to rank 0 {within}; it is frozen, hangs, or is cut off"
            raise RankLost(self._lost(group, str(error), what)) from error

    def _broadcast(self, box: list[Any]) -> None:
        try:
            dist.broadcast_object_list(box, src=0, group=self._results, device=torch.device("cpu"))
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} stops: a rank was lost in a broadcast ({error})") from error

    def _lost(self, group: dist.ProcessGroup, problem: str, what: str) -> str:
        if self.rank != 0:
            return f"rank {self.rank} stops: {self.names[0]} is gone, or has lost another rank"
        if listed := re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", problem):
            lost = [self.names[int(rank)] for rank in listed[1].split(",")]
        else:
            lost = [name for rank, name in enumerate(self.names) if rank and self._is_gone(group, rank)]
        return f"{', '.join(lost) or 'another rank'}: {what}"

    def _is_gone(self, group: dist.ProcessGroup, rank: int) -> bool:
        """Whether the connection to a rank is closed: gloo refuses at once to receive from it.

        The barrier itself does not say which rank was gone before it began. After a time-out gloo closes all.
        """
        try:
            dist.irecv(torch.zeros(1), rank, group)
        except RuntimeError:
            return True
        return False


def _portable(error: Exception) -> Exception | None:
    """The error, if another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return None
    return error
