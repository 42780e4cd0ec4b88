"""Rank zero acts alone while the others wait: results through a key-value store, and detection of a rank that died.

A collective cannot do this: its deadline is meant for an exchange of tensors, and sampling a batch takes longer.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from ctpo_megatron.base.stop import TRY_AGAIN

T = TypeVar("T")
logger = logging.getLogger(__name__)

BEAT_S = 5.0
"""Seconds between two heartbeats of a rank."""
LOST_AFTER_S = 40.0
"""A rank without a heartbeat for this many seconds is named; one whose process has ended is lost then."""
FROZEN_S = 300.0
"""Any other is lost after this many seconds without a heartbeat: it may be frozen, and come back."""
_STORE_TIMEOUT = timedelta(seconds=FROZEN_S)  # the store is frozen with rank zero, and comes back with it
LEAVE_S = 10.0
"""Rank zero waits at most this many seconds for the other ranks to leave."""
_LEFT = b"left"
"""Instead of a heartbeat: the rank has left."""
_POLL_S = (0.005, 0.25)
"""First and longest pause between two polls for a result."""


class RankZeroError(RuntimeError):
    """Rank zero failed and reports the cause itself; this rank stops too. The message is one line.

    __cause__: what rank zero raised, if it can be sent.
    """


class RankLost(RuntimeError):
    """Another rank of the job died or hangs; the message names it."""


class RankZero:
    """One per rank; all ranks of the job create, call and close it in the same order.

    rank, world_size, names: of this rank, and all ranks by name (`rank 1 (process 77 on host)`). board: keys and values
    that all ranks see, for short notes; thread-safe. waits: whether this rank is waiting for rank zero.
    """

    def __init__(
        self,
        *,
        beat_s: float = BEAT_S,
        lost_after_s: float = LOST_AFTER_S,
        leave_s: float = LEAVE_S,
        frozen_s: float = FROZEN_S,
    ) -> None:
        """beat_s, lost_after_s, leave_s, frozen_s: see `BEAT_S`, `LOST_AFTER_S`, `LEAVE_S`, `FROZEN_S`."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.waits = False
        self._beat_s, self._lost_after_s, self._leave_s, self._frozen_s = beat_s, lost_after_s, leave_s, frozen_s
        host = os.environ.get("MASTER_ADDR", "localhost")
        self._store, port = self._open(host)
        # A separate client: the store serves one call per client at a time, and a wait would delay the heartbeats.
        self._beats = TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT)
        self.board = PrefixStore("board", self._beats)
        self._calls = 0
        self._lost, self._heard = "", False
        self._closed = threading.Event()
        self._beats.set(f"beat/{self.rank}", "0")
        self._places: list[tuple[str, int]] = [("", 0)] * self.world_size
        dist.all_gather_object(self._places, (socket.gethostname(), os.getpid()))
        self.names = [f"rank {rank} (process {pid} on {host})" for rank, (host, pid) in enumerate(self._places)]
        self._thread = threading.Thread(target=self._signs_of_life, name="signs of life", daemon=True)
        self._thread.start()

    def _open(self, host: str) -> tuple[TCPStore, int]:
        box: list[int | None] = [None]
        store = None
        if self.rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
            box = [store.port]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        assert box[0] is not None
        return store or TCPStore(host, box[0], is_master=False, timeout=_STORE_TIMEOUT), box[0]

    def run(self, action: Callable[[], T]) -> T:
        """Run `action` on rank zero; every rank returns its result, which is pickled.

        There is no deadline except the action's own. When it raises, so does rank zero, and the others raise
        RankZeroError. Raises RankLost when a rank that others wait for is lost: within a minute where its process has
        ended, after `FROZEN_S` where it may be frozen.
        """
        self._calls += 1
        key = f"call/{self._calls}"
        if self.rank == 0:
            return self._act(key, action)
        self._await(key)
        problem, result, cause = pickle.loads(self._store.get(key))
        if self._store.add(f"{key}/read", 1) == self.world_size - 1:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/read")
        if problem:
            raise RankZeroError(f"rank {self.rank} stops, rank 0 failed: {problem.splitlines()[0]}") from cause
        return result  # type: ignore[no-any-return] # what rank zero pickled

    def check(self) -> None:
        """Raises RankLost when a rank is lost (`run`); for long actions."""
        if self._lost:
            self._heard = True
            raise RankLost(self._lost)

    def close(self) -> None:
        """Announce that this rank leaves. Rank zero, whose process holds the store, waits for the others."""
        self._closed.set()
        self._thread.join(timeout=_STORE_TIMEOUT.total_seconds())
        with suppress(dist.DistError):  # rank zero may have left before
            self._beats.set(f"beat/{self.rank}", _LEFT.decode())
        if self.rank == 0 and not self._lost:
            self._wait_for_leave()

    def _wait_for_leave(self) -> None:
        """Otherwise a rank that has not yet read the last result finds no store, and a finished run fails."""
        deadline = time.monotonic() + self._leave_s
        others = range(1, self.world_size)
        while True:
            beats = self._beats.multi_get([f"beat/{rank}" for rank in others])
            stay = [self.names[rank] for rank, beat in zip(others, beats, strict=True) if beat != _LEFT]
            if not stay:
                return
            if time.monotonic() > deadline:
                return logger.warning("rank 0 ends after %g s without %s", self._leave_s, ", ".join(stay))
            time.sleep(_POLL_S[0])

    def _act(self, key: str, action: Callable[[], T]) -> T:
        try:
            self.check()
            result = action()
        except Exception as error:
            told = f"{type(error).__name__}: {error}", None, _portable(error)
            self._store.set(key, pickle.dumps(told))  # type: ignore[arg-type]  # bytes too
            raise
        self._store.set(key, pickle.dumps(("", result, None)))  # type: ignore[arg-type]  # bytes too
        return result

    def _await(self, key: str) -> None:
        pause, longest = _POLL_S
        self.waits = True
        try:
            while True:
                self.check()
                if self._store.check([key]):
                    return
                time.sleep(pause)
                pause = min(longest, 2 * pause)
        except dist.DistNetworkError as error:
            raise RankLost(f"rank {self.rank} stops: {self.names[0]} is gone") from error
        finally:
            self.waits = False

    def _signs_of_life(self) -> None:
        """Send heartbeats and detect missing ones. Rank zero checks all ranks, the others check rank zero."""
        watched = range(1, self.world_size) if self.rank == 0 else range(1)
        seen = {rank: (b"", time.monotonic()) for rank in watched}
        silent = set[int]()
        count = 0
        while not (self._closed.wait(self._beat_s) or self._lost):
            count += 1
            try:
                with self._naming_rank_zero():
                    self._beats.set(f"beat/{self.rank}", str(count))
                    beats = self._beats.multi_get([f"beat/{rank}" for rank in watched])
                if self.rank != 0 and self._beats.check(["lost"]):
                    self._lost = f"rank {self.rank} stops: {self._beats.get('lost').decode()}"
            except dist.DistError:
                self._lost = f"rank {self.rank} stops: {self.names[0]} is gone"
                break
            now = time.monotonic()
            for rank, beat in zip(watched, beats, strict=True):
                for_s = now - seen[rank][1]
                if seen[rank][0] != beat or beat == _LEFT:
                    seen[rank] = (beat, now)
                    if rank in silent:
                        silent.discard(rank)
                        logger.warning("%s is back after %.0f s", self.names[rank], for_s)
                elif for_s > self._lost_after_s:
                    self._judge(rank, for_s, silent)
        if self._lost:
            self._leave_collective()

    @contextmanager
    def _naming_rank_zero(self) -> Iterator[None]:
        """Within, its store is asked: say so when it does not answer, and when it does again."""
        began = time.monotonic()
        timer = threading.Timer(self._lost_after_s, lambda: self._judge(0, time.monotonic() - began, set()))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if (for_s := time.monotonic() - began) > self._lost_after_s:
            logger.warning("%s is back after %.0f s", self.names[0], for_s)

    def _judge(self, rank: int, for_s: float, silent: set[int]) -> None:
        """What to say and do of a rank that has been silent for so long. silent: the ranks that were named."""
        news = f"{self.names[rank]} gave no sign of life for {for_s:.0f} s"
        if self._has_ended(rank) or for_s > self._frozen_s:
            return self._lose(news)
        if rank not in silent:
            silent.add(rank)
            logger.warning("%s: is it frozen, or its machine? The run waits for it, %g s at most", news, self._frozen_s)

    def _has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is known to be gone; a process of another machine is never."""
        host, pid = self._places[rank]
        if host != socket.gethostname():
            return False
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _leave_collective(self) -> None:
        """End this process unless its main thread hears of the loss soon: a collective lasts until its own deadline."""
        if not self._closed.wait(self._lost_after_s) and not self._heard:
            logger.error("%s; this rank waits in a collective, and ends with exit status %d", self._lost, TRY_AGAIN)
            os._exit(TRY_AGAIN)  # the main thread is in C code, and would never see an exception

    def _lose(self, news: str) -> None:
        self._lost = news
        if self.rank == 0:
            self._beats.set("lost", news)


def _portable(error: Exception) -> Exception | None:
    """The error, if another process can have it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does
        return None
    return error
