"""A stalled run: the stacks of a rank, which rank keeps the others waiting, and processes that are stopped."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ctpo_megatron.base.printable import ranges

log = logging.getLogger(__name__)

_PATH_PARTS = 3
"""As much of a path as tells files apart."""
_STARTS_MORE = ("raylet", "ray::Rollout")
"""Names of processes below which others of the run are; users' programs and functions are below the rest."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    phase: see `Progress.phase`. line: of its main thread. collectives: begun and not ended. awaits_rank_zero: it waits
    for what rank zero does alone.
    """

    phase: str
    line: str
    collectives: Sequence[str] = ()
    awaits_rank_zero: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return bool(self.collectives) or self.awaits_rank_zero

    def __str__(self) -> str:
        if self.collectives:
            state = f"waits in {'; '.join(self.collectives)}"
        else:
            state = "waits for rank 0" if self.awaits_rank_zero else "in no collective"
        return f"{state}; phase {self.phase or 'none'}; {self.line}"


class StackFile:
    """The file of one rank's dumps; it goes when it is closed and still empty, and an empty folder with it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def arm(self, seconds: float) -> None:
        """Dump the stacks unless this is called again within `seconds`, even where C code keeps Python's lock."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def dump(self, title: str) -> None:
        """Append the stacks of all threads."""
        self._file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S %z')} {title}\n".encode())
        faulthandler.dump_traceback(self._file)

    def close(self) -> None:
        """Write no more."""
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        with suppress(OSError):  # another rank's file is in the folder, or it was removed
            if self._path.stat().st_size == 0:
                self._path.unlink()
            self._path.parent.rmdir()


def main_thread_line() -> str:
    """Where the main thread stands: its innermost line, and the innermost one of ours that led there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "its main thread has ended"
    stack = traceback.extract_stack(frame)
    ours = [entry for entry in stack[:-1] if "/ctpo_" in entry.filename]
    lines = [_text(stack[-1]), *(f"called at {_text(entry)}" for entry in ours[-1:])]
    return ", ".join(lines)


def _text(entry: traceback.FrameSummary) -> str:
    path = "/".join(Path(entry.filename).parts[-_PATH_PARTS:])
    return f"{path}:{entry.lineno} in {entry.name}: {entry.line}"


def describe(places: Mapping[int, Place], names: Sequence[str]) -> str:
    """First the ranks that are not waiting, then the others; ranks at the same place share a line.

    places: of the ranks that answered. names: of all ranks, e.g. `rank 1 (process 77 on host)`.
    """
    ranks = range(len(names))
    silent = [rank for rank in ranks if rank not in places]
    waiting = [rank for rank in ranks if rank in places and places[rank].waits]
    awaited = [rank for rank in ranks if rank not in waiting]
    lines = [_verdict(awaited, waiting, names)]
    if silent:
        lines.append(f"{_joined(silent, names)}: no answer; stopped, gone, or in C code that keeps Python's lock")
    texts: dict[str, list[int]] = {}
    for rank in sorted(places, key=lambda rank: (places[rank].waits, rank)):
        texts.setdefault(str(places[rank]), []).append(rank)
    return "\n  ".join([*lines, *(f"{_joined(group, names)}: {text}" for text, group in texts.items())])


def _verdict(awaited: Sequence[int], waiting: Sequence[int], names: Sequence[str]) -> str:
    if not awaited:
        return "every rank waits for others: their collectives differ, or the network between them is gone"
    if not waiting:
        return f"{_joined(awaited, names)} {'does' if len(awaited) == 1 else 'do'} not continue"
    return f"{_joined(waiting, names)} {'waits' if len(waiting) == 1 else 'wait'} for {_joined(awaited, names)}"


def _joined(ranks: Sequence[int], names: Sequence[str]) -> str:
    """`rank 1 (process 77 on host)`, or `ranks 0, 2-7`."""
    if len(ranks) == 1:
        return names[ranks[0]]
    return f"ranks {ranges(ranks)}"


class StoppedProcesses:
    """Names the processes that this one has started, and which are stopped, as by SIGSTOP, at two checks in a row.

    What waits for one cannot tell it from one that is busy.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._named: set[int] = set()

    def check(self) -> None:
        """Log what is stopped now and was at the last check, once; and what runs again."""
        found = {each.pid: name for each, name in _stopped(psutil.Process())}
        for pid in found.keys() & self._seen - self._named:
            log.warning(
                "%s (process %d) is stopped; what waits for it continues after kill -CONT %d", found[pid], pid, pid
            )
        for pid in self._named - found.keys():
            log.warning("process %d is not stopped any more", pid)
        self._named = found.keys() & (self._named | self._seen)
        self._seen = set(found)


def _stopped(parent: psutil.Process) -> Iterator[tuple[psutil.Process, str]]:
    try:
        children = parent.children()
    except psutil.NoSuchProcess:  # it has ended, and another process has its number
        return
    for child in children:
        try:
            name, status = child.name(), child.status()
        except psutil.NoSuchProcess:
            continue
        if status == psutil.STATUS_STOPPED:
            yield child, name
        if name.startswith(_STARTS_MORE):
            yield from _stopped(child)
