"""Logs of engines, in the run directory wherever the engines run.

On a cluster an engine may not see the run directory, so it looks for a marker file of the driver there. Without it the
engine writes to a file of its node. The driver copies that file every few seconds, and once more when the engine has
stopped, and then removes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ctpo_megatron.engines.tasks import EngineSeat
from ctpo_megatron.engines.timeouts import LOG_CLOSE_S, LOG_COPY_INTERVAL_S, LOG_READ_S

_CHUNK = 4 << 20

log = logging.getLogger(__name__)


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
    """The result of a call of `RolloutEngine.seat`; None before Ray has placed the engine, or when it never did."""
    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        seat: EngineSeat = ray.get(reference)
    except RayError:
        return None
    return seat


class LogCopy:
    """Copies the log of one engine process to `target`; does nothing where the engine writes there itself.

    done: the copy is complete, or the rest is out of reach.
    """

    def __init__(self, name: str, target: Path, actor: Any, seat_reference: Any) -> None:
        self._name, self._target, self._actor, self._seat_reference = name, target, actor, seat_reference
        self._offset = 0
        self._ended = self.done = False
        self._lock = threading.Lock()

    def end(self, *, reachable: bool) -> None:
        """The engine is being stopped. reachable: its actor still answers, so everything is copied now."""
        if reachable:
            self.copy(last=True)
        self._ended = True

    def copy(self, *, last: bool = False) -> None:
        """Append what was written since the last call. last: also remove the log of the node."""
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
            while data := ray.get(there(read_from, self._offset), timeout=LOG_READ_S):
                with self._target.open("ab") as file:
                    file.write(data)
                self._offset += len(data)
            if ended or last:
                ray.get(there(remove), timeout=LOG_READ_S)
                self.done = True
        except TimeoutError:  # loading its model, or out of reach: tried again next time
            return
        except RayError as error:
            if ended:
                self.done = True
                log.warning(
                    "the log of %s ends at byte %d of %s on %s, which is out of reach: %s",
                    *(self._name, self._offset, seat.log_path, seat.address, str(error).splitlines()[0]),
                )

    def _in_engine(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function with the path of the log, in the actor. Returns Ray's reference of the result."""
        return self._actor.with_log.remote(function, *arguments)

    def _in_node(self, seat: EngineSeat) -> Callable[..., Any]:
        """The same in a new process on the node, once the engine has stopped."""
        there = NodeAffinitySchedulingStrategy(seat.node_id, soft=False)
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": there}
        return lambda function, *given: ray.remote(function).options(**options).remote(seat.log_path, *given)


class LogCollector:
    """Copies the logs of all engines every few seconds, in a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._copies: list[LogCopy] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-logs", daemon=True)
        self._thread.start()

    def follow(self, copy: LogCopy) -> None:
        """Copy this log from now on."""
        self._copies.append(copy)

    def close(self) -> None:
        """Copy once more what can be reached; waits `LOG_CLOSE_S` at most."""
        self._closing.set()
        self._thread.join(LOG_CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(LOG_COPY_INTERVAL_S):
            self._collect()
        self._collect()

    def _collect(self) -> None:
        for copy in list(self._copies):  # `follow` may add one meanwhile
            if not copy.done:
                copy.copy()
