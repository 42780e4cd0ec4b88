"""Ray's own processes: what they are started with, which of them has died, and what they say."""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import services, worker

from ctpo_megatron.base.printable import printable
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
_LONGEST_LINE = 300

log = logging.getLogger(__name__)


@contextmanager
def children_end_soon() -> Iterator[None]:
    """Processes that Ray starts within get an environment unlike the driver's, which outlives its GCS."""
    start = services.start_ray_process

    def shorter(*arguments: Any, **named: Any) -> Any:
        return start(*arguments, **{**named, "env_updates": {**(named.get("env_updates") or {}), **_OF_CHILDREN}})

    services.start_ray_process = shorter
    try:
        yield
    finally:
        services.start_ray_process = start


class RayDaemons:
    """Watches the GCS and the raylet of the Ray that this process has started, or the GCS of one that it has joined.

    lost: why Ray cannot start another engine any more, or "". head: why the run cannot continue, or "". agents: what
    the raylet has started with itself. Once both daemons are gone, nothing ends them for over a minute.
    """

    def __init__(self) -> None:
        self.lost = self.head = ""
        self._closing = os.eventfd(0)
        node = worker._global_node
        assert node is not None  # Ray is up
        started = node.all_processes
        pids: dict[str, int] = {name: started[name][0].process.pid for name in (_GCS, _RAYLET) if name in started}
        self._watched: dict[int, tuple[str, int]] = {os.pidfd_open(pid): (name, pid) for name, pid in pids.items()}
        self.agents: list[psutil.Process] = []
        if _RAYLET in pids:
            self.agents = psutil.Process(pids[_RAYLET]).children(recursive=True)
        self._address: str = "" if pids else ray.get_runtime_context().gcs_address
        worker.print_to_stdstream = self._say  # Ray's own function prints pages of a daemon's log

    def watch(self, head_lost: Callable[[str], None]) -> None:
        """Return after `close`. Calls `head_lost` with the reason once, when the GCS is gone."""
        poll = select.poll()
        for descriptor in (self._closing, *self._watched):
            poll.register(descriptor, select.POLLIN)
        seen, told = time.monotonic(), False
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(1000 * HEAD_POLL_S if self._address else None)]
            if self._closing in ready:
                break
            for descriptor in ready:
                poll.unregister(descriptor)
                self._died(*self._watched[descriptor])
            if self._address and (seen := self._last_seen(seen)) + HEAD_LOST_S < time.monotonic():
                self._address, gone = "", f"Ray's GCS at {self._address} has not answered for {HEAD_LOST_S:g} s"
                self.head = self.lost = gone
            if self.head and not told:
                told = True
                head_lost(self.head)
        for descriptor in (self._closing, *self._watched):
            os.close(descriptor)

    def close(self) -> None:
        """End `watch`; call it once."""
        os.eventfd_write(self._closing, 1)

    def _died(self, name: str, pid: int) -> None:
        if name == _GCS:
            self.head = self.lost = f"Ray's GCS (process {pid}) died"
        elif not self.lost:
            self.lost = f"Ray's raylet (process {pid}) died"
            log.warning("%s: the engines continue, but none of them can be replaced any more", self.lost)

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
        if lines and not self.lost:
            log.warning("Ray: %s", printable(lines[0])[:_LONGEST_LINE])
