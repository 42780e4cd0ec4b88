"""A thread on every rank: rank zero writes the heartbeat and names the rank that blocks the others in a stall."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch.distributed as dist

from ctpo_megatron.base import clock
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.stop import TRY_AGAIN
from ctpo_megatron.policy import RankZero, pending_collectives
from ctpo_megatron.run.stall import Place, StackFile, StoppedProcesses, describe, main_thread_line
from ctpo_megatron.run.timeouts import CHILDREN_BEATS, HEARTBEAT_S, STACKS_BEATS
from ctpo_megatron.tracking import Heartbeat, Progress

log = logging.getLogger(__name__)

END_STATUS = TRY_AGAIN
"""Exit status of a run that is ended because it stalled."""
_STALL, _END = "stall", "end"


class Watchdog:
    """`with Watchdog(...)` on every rank of a job watches the block.

    Processes of the run that are stopped are named (`StoppedProcesses`). After `timeout_s` seconds without progress of
    any rank (None: never) every rank dumps its Python stacks into `stalls/` of the run directory, and rank zero logs
    where each rank is. This is done once until there is progress again. Then the run continues, or with `end` all ranks
    exit at once with END_STATUS.
    """

    def __init__(
        self,
        progress: Progress,
        rank_zero: RankZero | None,
        directory: Path,
        *,
        timeout_s: float | None,
        end: bool = False,
        beat_s: float = HEARTBEAT_S,
    ) -> None:
        """rank_zero: None where there is only one rank."""
        self._progress, self._rank_zero, self._directory = progress, rank_zero, directory
        self._timeout_s, self._end, self._beat_s = timeout_s, end, beat_s
        self._rank = 0 if rank_zero is None else rank_zero.rank
        self._names = [f"rank 0 ({_process()})"] if rank_zero is None else rank_zero.names
        self._board = dist.HashStore() if rank_zero is None else rank_zero.board
        self._beats = self._stalls = 0
        self._stalled = False
        self._seen: dict[int, tuple[int, float, float]] = {}
        self._warned = False
        self._stopped = StoppedProcesses()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            self._stacks = StackFile(RunPaths(self._directory).stacks(self._rank))
        if self._rank == 0 or self._timeout_s is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._timeout_s is not None:
            self._stacks.close()
        if self._rank == 0:
            self._write("failed" if kind is not None and issubclass(kind, Exception) else "ended", 0.0)

    def _watch(self) -> None:
        try:
            while True:
                self._beat()
                if self._closed.wait(self._beat_s):
                    return
        except dist.DistError as error:
            log.info("rank %d watches no longer: rank 0 has left (%s)", self._rank, error)

    def _beat(self) -> None:
        self._beats += 1
        if self._beats % CHILDREN_BEATS == 0:
            self._stopped.check()
        if self._timeout_s is None:
            return self._write("running", self._progress.idle_s)
        # Armed again at every beat, so it fires only where this thread cannot run: C code keeps Python's lock.
        self._stacks.arm(self._timeout_s + self._beat_s)
        self._board.set(f"progress/{self._rank}", json.dumps([self._beats, self._progress.idle_s]))
        if self._rank == 0:
            idle_s = self._idle_s()
            self._write("running", idle_s)
            return self._judge(idle_s, self._timeout_s)
        if self._board.check([_STALL]) and (number := int(self._board.get(_STALL))) > self._stalls:
            self._stalls = number
            self._board.set(f"{_STALL}/{number}/{self._rank}", json.dumps(asdict(self._dump())))
        if self._board.check([_END]):
            os._exit(END_STATUS)

    def _idle_s(self) -> float:
        """Seconds since any rank made progress; of one that is silent, as if it had made none since its last beat."""
        now = time.monotonic()
        for rank in range(len(self._names)):
            key = f"progress/{rank}"
            beats, idle_s = json.loads(self._board.get(key)) if self._board.check([key]) else (0, 0.0)
            # By its count of beats and the time they arrived here: the clocks of nodes differ.
            if rank not in self._seen or self._seen[rank][0] != beats:
                self._seen[rank] = (beats, idle_s, now)
        return min(idle_s + now - heard for _, idle_s, heard in self._seen.values())

    def _judge(self, idle_s: float, timeout_s: float) -> None:
        if idle_s <= timeout_s:
            if self._stalled:
                log.warning("the run makes progress again")
            self._stalled = False
        elif not self._stalled:
            self._stalled = True
            self._stalls += 1
            self._report(idle_s, self._places())

    def _places(self) -> dict[int, Place]:
        """Ask every rank to dump its stacks, and collect where they stand from those that answer soon."""
        self._board.set(_STALL, str(self._stalls))
        places = {0: self._dump()}
        until = time.monotonic() + STACKS_BEATS * self._beat_s
        while len(places) < len(self._names) and time.monotonic() < until:
            time.sleep(self._beat_s / 4)
            for rank in range(1, len(self._names)):
                key = f"{_STALL}/{self._stalls}/{rank}"
                if rank not in places and self._board.check([key]):
                    places[rank] = Place(**json.loads(self._board.get(key)))
        return places

    def _dump(self) -> Place:
        awaits = self._rank_zero is not None and self._rank_zero.waits
        place = Place(self._progress.phase, main_thread_line(), pending_collectives(), awaits)
        try:
            self._stacks.dump(f"{self._names[self._rank]}: {place}")
        except OSError as error:
            log.warning("the stacks of rank %d could not be written: %s", self._rank, error)
        return place

    def _report(self, idle_s: float, places: dict[int, Place]) -> None:
        paths = RunPaths(self._directory)
        text = (
            f"no progress for {idle_s:.0f} s (run.stall_timeout_s = {self._timeout_s:g}), after step "
            f"{self._progress.step}: {describe(places, self._names)}\n  stacks of all threads: {paths.stalls}"
        )
        log.warning("%s", text)
        try:
            with paths.stall_report.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} {text}\n")
        except OSError as error:
            log.warning("%s could not be written: %s", paths.stall_report, error)
        if self._end:
            log.error("the run ends now (run.end_on_stall), with exit status %d", END_STATUS)
            self._board.set(_END, "1")
            time.sleep(2 * self._beat_s)  # the other ranks read it from this process's store
            os._exit(END_STATUS)  # the main thread is blocked, and would never see an exception

    def _write(self, state: Literal["running", "ended", "failed"], idle_s: float) -> None:
        now = clock.now()
        phase, host = self._progress.phase, socket.gethostname()
        heartbeat = Heartbeat(
            state, self._progress.step, phase, now, now - idle_s, self._stalls, len(self._names), os.getpid(), host
        )
        try:
            heartbeat.write(self._directory)
        except OSError as error:
            if not self._warned:
                log.warning("the heartbeat of the run could not be written: %s", error)
            self._warned = True


def _process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
