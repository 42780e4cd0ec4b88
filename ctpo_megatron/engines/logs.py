"""Logs of engines, in the run directory wherever the engines run.

On a cluster an engine may not see the run directory. It looks for a mark that the driver has put there. Without it the
engine writes to a file of its node, which the driver copies every few seconds, and once more when the engine has ended.
Then that file is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ctpo_megatron.engines.tasks import EngineSeat, EngineSpec

_INTERVAL_S = 5.0
_READ_TIMEOUT_S = 10.0
_CHUNK = 4 << 20
_MARK = ".engines"

log = logging.getLogger(__name__)


def redirect_output(path: Path) -> None:
    """Send this process's and its children's stdout and stderr to `path`. Raises OSError that names it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def mark(directory: Path) -> str:
    """Leave a mark in `directory`, by which other nodes tell that they see the same one."""
    name = uuid.uuid4().hex
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARK).write_text(name, encoding="utf-8")
    return name


def unmark(directory: Path) -> None:
    """Remove the mark."""
    (directory / _MARK).unlink(missing_ok=True)


def path_here(spec: EngineSpec, index: int) -> Path:
    """Where engine `index` writes on this node: the run directory, if this node sees it."""
    path = spec.log_path(index)
    if not spec.log_mark:
        return path
    try:
        seen = (spec.log_dir / _MARK).read_text(encoding="utf-8") == spec.log_mark
    except OSError:
        seen = False
    return (
        path if seen else Path(tempfile.gettempdir()) / f"ctpo-logs-{spec.log_mark}" / f"{path.stem}.{os.getpid()}.log"
    )


def read_from(path: str, offset: int) -> bytes:
    """The next bytes of a log from `offset` on, a few MiB at most; empty at its end."""
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(_CHUNK)


def remove(path: str) -> None:
    """Remove a log, and its folder with the last one."""
    Path(path).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other engines of the node write there
        Path(path).parent.rmdir()


def seat_of(reference: Any) -> EngineSeat | None:
    """Where an engine is, by the reference of `RolloutEngine.seat`; None before it has a place, or if it never had."""
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        seat: EngineSeat = ray.get(reference)
    except RayError:
        return None
    return seat


class LogCopy:
    """The log of one engine process on its way to `target`; nothing to do where the engine writes there itself.

    done: nothing more will come.
    """

    def __init__(self, name: str, target: Path, actor: Any, seat_reference: Any) -> None:
        self._name, self._target, self._actor, self._seat_reference = name, target, actor, seat_reference
        self._offset = 0
        self._ended = self.done = False
        self._lock = threading.Lock()

    def end(self, *, reachable: bool) -> None:
        """The engine is being ended; `reachable`: its actor still answers, so everything is copied now."""
        if reachable:
            self.copy(last=True)
        self._ended = True

    def copy(self, *, last: bool = False) -> None:
        """Append what has been written since the last call; `last`: nothing follows that is worth keeping."""
        seat = seat_of(self._seat_reference)
        with self._lock:
            if seat is None or seat.log_path == str(self._target):
                self.done = self.done or self._ended or seat is not None
            elif not self.done:
                self._copy(seat, last=last)

    def _copy(self, seat: EngineSeat, *, last: bool) -> None:
        ended = self._ended
        there = self._in_node(seat) if ended else self._in_engine
        try:
            while data := ray.get(there(read_from, self._offset), timeout=_READ_TIMEOUT_S):
                with self._target.open("ab") as file:
                    file.write(data)
                self._offset += len(data)
            if ended or last:
                ray.get(there(remove), timeout=_READ_TIMEOUT_S)
                self.done = True
        except TimeoutError:  # busy with loading, or out of reach: next time
            return
        except RayError as error:
            if ended:
                self.done = True
                log.warning(
                    "the log of %s ends at byte %d of %s on %s, which is out of reach: %s",
                    *(self._name, self._offset, seat.log_path, seat.address, str(error).splitlines()[0]),
                )

    def _in_engine(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the path of the log; the reference of what it returns."""
        return self._actor.with_log.remote(function, *arguments)

    def _in_node(self, seat: EngineSeat) -> Callable[..., Any]:
        """The same from another process of its node, once the engine has ended."""
        there = NodeAffinitySchedulingStrategy(seat.node_id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        return lambda function, *given: ray.remote(function).options(**options).remote(seat.log_path, *given)


class LogCollector:
    """Copies the logs of all engines of a fleet every few seconds, in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._copies: list[LogCopy] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-logs", daemon=True)
        self._thread.start()

    def follow(self, copy: LogCopy) -> None:
        """Copy this one from now on."""
        self._copies.append(copy)

    def close(self) -> None:
        """Copy once more what can be reached; waits half a minute at most."""
        self._closing.set()
        self._thread.join(3 * _READ_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closing.wait(_INTERVAL_S):
            self._collect()
        self._collect()

    def _collect(self) -> None:
        for copy in [copy for copy in self._copies if not copy.done]:
            copy.copy()
