"""Ray's own processes: what they are started with, which of them has died, and what they say."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import ray
from ray._private import services, worker

from ctpo_megatron.base.printable import printable
from ctpo_megatron.base.processes import runs
from ctpo_megatron.engines.timeouts import HEAD_CONNECT_S, HEAD_LOST_S, HEAD_POLL_S

_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_INLINE_BYTES = str(256 << 20)
OF_DRIVER = {_RECONNECT: str(7 * 24 * 3600)}
"""Ray ends a driver without its GCS, by `_exit`, after this time: longer than any `checkpoint.grace_s`. The run ends
by itself."""
OF_PRIVATE = {
    "RAY_health_check_failure_threshold": "100000",  # otherwise engines end seconds after a raylet that died
    # Objects of any usual size go past the store, which is a part of the raylet.
    "RAY_max_direct_call_object_size": _INLINE_BYTES,
    "RAY_task_rpc_inlined_bytes_limit": _INLINE_BYTES,
}
_OF_CHILDREN = {_RECONNECT: "10"}  # how long orphaned agents and engines linger after a killed driver
_GCS, _RAYLET = "gcs_server", "raylet"
_SHOWN = {_GCS: "GCS", _RAYLET: "raylet"}
_LONGEST_LINE = 300

log = logging.getLogger(__name__)


class RayDaemons:
    """Watches the GCS and the raylet of the Ray that this process starts, or the GCS of one that it joins.

    lost: why Ray cannot start another engine any more, or "". head: why the run cannot continue, or "". While Ray
    starts it waits for either of them for half a minute, or for ever. started: Ray's processes that are children of
    this one.
    """

    def __init__(self, head_lost: Callable[[str], None]) -> None:
        """head_lost: called once, by a thread, with what `head` is then set to."""
        self.lost = self.head = ""
        self.started: list[psutil.Process] = []
        self._agents: list[psutil.Process] = []
        self._head_lost = head_lost
        self._address = ""
        self._starting = True
        self._closing = os.eventfd(0)
        self._poll = select.epoll()  # unlike `poll`, it heeds what is registered while it waits
        self._poll.register(self._closing, select.EPOLLIN)
        self._watched: dict[int, tuple[str, psutil.Process]] = {}
        worker.print_to_stdstream = self._say  # Ray's own function prints pages of a daemon's log
        threading.Thread(target=self._watch, name="ray-daemons", daemon=True).start()

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Watch what Ray starts within, in an environment unlike the driver's, which outlives its GCS."""
        start = services.start_ray_process

        def watched(command: Any, process_type: str, *arguments: Any, **named: Any) -> Any:
            named["env_updates"] = {**(named.get("env_updates") or {}), **_OF_CHILDREN}
            started = start(command, process_type, *arguments, **named)
            process = psutil.Process(started.process.pid)
            self.started.append(process)
            if process_type in _SHOWN:
                descriptor = os.pidfd_open(process.pid)
                self._watched[descriptor] = process_type, process
                self._poll.register(descriptor, select.EPOLLIN)
            return started

        services.start_ray_process = watched
        try:
            yield
        finally:
            services.start_ray_process = start

    def connected(self) -> None:
        """This process is connected to Ray, whose processes are as they stay."""
        self._agents = self.below()
        self._address = "" if self.started else ray.get_runtime_context().gcs_address
        self._starting = False

    def below(self) -> list[psutil.Process]:
        """What Ray's processes have started, also where they are gone. Nothing else ends it for over a minute."""
        found = {*self._agents}
        for process in self.started:
            with suppress(psutil.NoSuchProcess):
                found |= {*process.children(recursive=True)}
        return [*found]

    def _watch(self) -> None:
        seen = time.monotonic()
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll(HEAD_POLL_S)]
            if self._closing in ready:
                break
            for descriptor in ready:
                self._poll.unregister(descriptor)
                self._died(*self._watched[descriptor])
            if self._address and (seen := self._last_seen(seen)) + HEAD_LOST_S < time.monotonic():
                self._lose(f"Ray's GCS at {self._address} has not answered for {HEAD_LOST_S:g} s")
        self._poll.close()
        for descriptor in (self._closing, *self._watched):
            os.close(descriptor)

    def close(self) -> None:
        """Watch no longer; call it once."""
        os.eventfd_write(self._closing, 1)

    def _died(self, name: str, process: psutil.Process) -> None:
        died = f"Ray's {_SHOWN[name]} (process {process.pid}) died"
        if self._starting:
            self._lose(f"{died} while Ray started")
        elif name == _GCS:
            self._lose(died)
        elif not self.lost:
            self.lost = died
            log.warning("%s: the engines continue, but none of them can be replaced any more", died)

    def _lose(self, why: str) -> None:
        if not self.head:
            self._address = ""
            self._head_lost(why)  # first: what reads `head` finds that the run is to stop
            self.head = self.lost = why

    def _last_seen(self, before: float) -> float:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_CONNECT_S).close()
        except OSError:
            return before
        return time.monotonic()

    def _say(self, data: Mapping[str, Any], *_: object, **__: object) -> None:
        """Instead of `print_to_stdstream` of Ray: the first line of what it reports, of living daemons alone."""
        lines = "\n".join(map(str, data.get("lines", ()))).strip().splitlines()
        if lines and not self.lost and all(runs(process) for _, process in self._watched.values()):
            log.warning("Ray: %s", printable(lines[0])[:_LONGEST_LINE])
