"""A private, quiet Ray instance for the engines, or a connection to the cluster that RAY_ADDRESS names.

Any process that reaches a Ray node can run code on it, so several nodes need Ray's token authentication (SECURITY.md).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from ctpo_megatron.base.addresses import is_own
from ctpo_megatron.base.cuda_environment import of_this_rank
from ctpo_megatron.base.processes import end_all, runs
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, QUIET, TOKEN, TOKEN_FILE
from ctpo_megatron.base.ray_orphans import PARENT, PREFIX, end_orphans
from ctpo_megatron.base.stop import STOP_POLL_S, action_kept, children_spared
from ctpo_megatron.config import ClusterConfig
from ctpo_megatron.engines.cluster import NODE_POLL_S, RayCluster
from ctpo_megatron.engines.tasks import EngineError
from ctpo_sandbox import temporary

_HEAD_CONNECT_S = 5.0
"""One attempt to connect to Ray's head."""
_CLOSE_S = 30.0
"""Shutdown of a private Ray, which runs in a thread of its own."""
_KILLED_S = 10.0
"""For killed processes of a private Ray to end: the kernel frees their memory first."""
_LAST_PORT = 65535
_OBJECT_STORE_BYTES = 256 << 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_INLINE_BYTES = str(256 << 20)
_OF_CLUSTER = {**QUIET, AUTH_MODE: "disabled"}
_OF_PRIVATE = {
    **QUIET,
    "RAY_health_check_failure_threshold": "100000",  # otherwise engines end seconds after a raylet that died
    # Objects of any usual size go past the store, which is a part of the raylet.
    "RAY_max_direct_call_object_size": _INLINE_BYTES,
    "RAY_task_rpc_inlined_bytes_limit": _INLINE_BYTES,
}
_RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""Without its GCS Ray ends a process, by `_exit`, after this time in seconds: a minute by its default, in which the run
could not save. Agents of a killed run stay for as long, or until the next start (`ray_orphans`)."""
_DAEMONS = {"gcs_server": "GCS", "raylet": "raylet"}

log = logging.getLogger(__name__)


@contextmanager
def _variables(changes: Mapping[str, str | None], without: Collection[str] = ()) -> Iterator[None]:
    """Set variables for processes that are started within; None leaves one as it is. All are restored at the end.

    without: variables that those processes do not get.
    """
    before = {name: os.environ.get(name) for name in (*changes, *without)}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _secret() -> str:
    """The token of every private Ray of this process: Ray reads its token only once per process."""
    return secrets.token_hex(32)


def _token(directory: Path) -> dict[str, str | None]:
    """Variables for a Ray that refuses callers without `_secret`; none where the user has set RAY_AUTH_MODE.

    RAY_AUTH_MODE has no effect once Ray is imported, so `ray.init` sets it where it is unset; here it is only restored.
    """
    if AUTH_MODE in os.environ:
        return {}
    file = directory / "token"
    file.touch(0o600)
    file.write_text(_secret(), encoding="utf-8")
    return {AUTH_MODE: None, TOKEN_FILE: str(file)}


def join_ray(cluster: ClusterConfig, deadline: float) -> None:
    """Connect this process to the cluster of RAY_ADDRESS.

    Raises EngineError at `deadline` (monotonic seconds) when its head does not answer. It raises at once when the head
    refuses, when several nodes have no token, and when `cluster.node_address` is not this machine's.
    """
    _check_token(cluster.nodes)
    if cluster.node_address is not None and not is_own(cluster.node_address):  # Ray would look for it for minutes
        raise EngineError(f"cluster.node_address={cluster.node_address} is no address of this machine")
    address = os.environ[ADDRESS]
    _await_head(address, deadline)
    try:
        with _variables(_RECONNECT):
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _node_ip_address=cluster.node_address,
            )
    except (ConnectionError, RuntimeError, RayError) as error:
        where = cluster.node_address or "any of this machine's addresses"
        raise EngineError(
            f"cannot join the Ray cluster at {address} through a Ray node of this machine at {where} "
            f"(cluster.node_address): {error.__cause__ or error}"
        ) from error


def _check_token(nodes: int) -> None:
    """Refuse several nodes that would run code of any process that reaches them."""
    if nodes == 1:
        return
    mode, path = os.environ.get(AUTH_MODE), os.environ.get(TOKEN_FILE)
    advice = (
        f"{nodes} Ray nodes (cluster.nodes) run code for anyone who can connect. On every node, before `ray start`: "
        f"export {AUTH_MODE}=token {TOKEN_FILE}=FILE, with the same secret in FILE, of mode 0600"
    )
    if mode is None or mode.lower() != "token" or not path:
        raise EngineError(f"{AUTH_MODE}={mode}, {TOKEN_FILE}={path}: {advice}")
    if os.environ.get(TOKEN):
        raise EngineError(f"{TOKEN} is set, which every program of the node inherits: unset it. {advice}")
    if not Path(path).is_file():
        raise EngineError(f"{TOKEN_FILE}={path} is no file: {advice}")
    if Path(path).stat().st_mode & 0o077:
        raise EngineError(f"{TOKEN_FILE}={path} can be read or written by other users; type chmod 600 {path}")


def _await_head(address: str, deadline: float) -> None:
    """Wait until Ray's head accepts a connection. The first failure is logged: the address may be an old one."""
    if "://" in address:
        raise EngineError(f"{ADDRESS}={address}: Ray Client is not supported; give HOST:PORT of Ray's head")
    host, separator, port = address.rpartition(":")
    if not separator:  # "auto"
        return
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise EngineError(f"{ADDRESS}={address}: {port!r} is no port; give HOST:PORT of Ray's head")
    warned = False
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        try:
            return socket.create_connection((host.strip("[]"), int(port)), min(left_s, _HEAD_CONNECT_S)).close()
        except OSError as error:
            if time.monotonic() + NODE_POLL_S > deadline:
                raise EngineError(f"{ADDRESS}={address}: Ray's head does not answer: {error}") from error
            if not warned:
                warned = True
                log.warning(
                    "%s=%s: Ray's head does not answer (%s); waiting for it, %.0f s at most (rollout.start_timeout_s). "
                    "Type unset %s for engines on this machine alone",
                    *(ADDRESS, address, error, left_s, ADDRESS),
                )
        time.sleep(NODE_POLL_S)


class RayRuntime:
    """Starts Ray when constructed, then calls `then(number of GPUs)`; `is_up` and `wait` report the result.

    All of it happens in a thread of its own that lives until `close`. So the caller continues meanwhile and keeps its
    signal handlers. The kernel kills the processes of a private Ray when the thread that started them ends, so Ray
    ends with this process however that ends.
    """

    def __init__(
        self,
        cpus: int,
        then: Callable[[float], None],
        gpus: str | None = None,
        cluster: RayCluster | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """gpus: what a private Ray sees, as in `CUDA_VISIBLE_DEVICES`; None: all GPUs of this process.

        cluster: the cluster of RAY_ADDRESS, to be joined within `timeout_s`; None starts a private Ray.
        """
        self._cpus, self._then, self._gpus = cpus, then, gpus
        self._cluster, self._deadline = cluster, time.monotonic() + timeout_s
        self._folder: Path | None = None
        self._ours = not ray.is_initialized()
        self._daemons: dict[str, psutil.Process] = {}
        self._up, self._closing = Future[None](), threading.Event()
        self._keeper = threading.Thread(target=self._run, name="ray-keeper", daemon=True)
        self._keeper.start()

    def is_up(self, deadline: float) -> bool:
        """Whether `then` has run.

        Raises what Ray or `then` raised, TimeoutError after `deadline` (monotonic), EngineError when Ray's processes
        have died.
        """
        if self._up.done():
            self._up.result()
            return True
        if lost := self.lost:
            raise EngineError(lost)
        if time.monotonic() < deadline:
            return False
        where = f"its logs: {self._folder}"
        if self._cluster is not None:
            where = f"is there a Ray node of RAY_ADDRESS={os.environ.get(ADDRESS)} on this machine?"
        raise TimeoutError(f"Ray is not up in time; {where}")

    def wait(self, timeout_s: float) -> None:
        """Return once `then` has run; raises as `is_up`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_up(deadline):
            wait([self._up], min(STOP_POLL_S, max(0.0, deadline - time.monotonic())))

    @property
    def lost(self) -> str:
        """Why a private Ray cannot start another engine any more; "" while it can, and of a cluster."""
        return self.head_lost or self._died("raylet")

    @property
    def head_lost(self) -> str:
        """Why no loss of an engine would be noticed any more; "" while it would, and of a cluster."""
        return self._died("gcs_server")

    def _died(self, name: str) -> str:
        self._find_daemons()
        process = self._daemons.get(name)
        return "" if process is None or runs(process) else f"Ray's {_DAEMONS[name]} (process {process.pid}) died"

    def _find_daemons(self) -> None:
        """Note the GCS and the raylet as Ray starts them; it waits for ever for one that dies meanwhile."""
        if self._ours and self._cluster is None and not self._up.done():
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if (name := child.name()) in _DAEMONS:
                        self._daemons.setdefault(name, child)

    def close(self) -> None:
        """Shut Ray down if this object started or joined it. Idempotent."""
        self._closing.set()
        if self.lost and not self._up.done():  # the thread may wait for Ray's processes for ever
            self._end_processes(self._below())
        else:
            self._keeper.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            with action_kept(signal.SIGTERM):  # Ray would print a trace of C++ before the run's own message
                self._connect()
            self._find_daemons()
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            self._then(float(resources.get("GPU", 0.0)))
        except BaseException as error:
            self._up.set_exception(error)
        else:
            self._up.set_result(None)
        self._closing.wait()
        below = self._below()
        if self._ours and ray.is_initialized():
            if self._cluster is None:
                # Ray itself sends SIGTERM to one process after another, and waits a second for each. Processes that
                # started within `children_spared` ignore SIGTERM.
                node = ray._private.worker._global_node
                assert node is not None  # a Ray of this process
                for process in [each.process for kind in node.all_processes.values() for each in kind]:
                    process.terminate = process.kill
            ray.shutdown()
        self._end_processes(below)

    def _connect(self) -> None:
        for name, value in (_OF_CLUSTER if self._cluster else _OF_PRIVATE).items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        if not self._ours:
            return
        if self._cluster is not None:
            return join_ray(self._cluster.settings, self._deadline)
        # Unix socket paths are limited to about 100 characters, so TMPDIR is not used.
        self._folder = temporary.new_folder(PREFIX, PARENT)
        # Only Ray's processes see the change: this one read CUDA_VISIBLE_DEVICES when it initialized CUDA.
        changes = {_VISIBLE: self._gpus, **_token(self._folder), **_RECONNECT}
        # A signal to the process group must spare Ray's head: the trainer needs it until it has saved its state.
        with _variables(changes, without=of_this_rank()), children_spared():
            ray.init(
                address="local",
                num_cpus=self._cpus,
                num_gpus=None if self._gpus is None else len(self._gpus.split(",")),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._folder / "ray"),  # all users may write there, so it lies in a private folder
            )

    def _below(self) -> list[psutil.Process]:
        """What Ray's processes have started. Nothing else ends it for over a minute."""
        below: list[psutil.Process] = []
        for process in self._daemons.values():
            with suppress(psutil.NoSuchProcess):
                below += process.children(recursive=True)
        return below

    def _end_processes(self, below: list[psutil.Process]) -> None:
        """End what is left of a private Ray, and remove its folder."""
        if left := end_all([*self._daemons.values(), *below], _KILLED_S):  # most end by themselves
            log.warning("still running %g s after SIGKILL, as Ray ended: %s", _KILLED_S, ", ".join(map(str, left)))
        if self._folder is None:
            return
        for _ in range(20):  # for a second: Ray's last processes may still write to it
            shutil.rmtree(self._folder, ignore_errors=True)
            if not self._folder.exists():
                temporary.forget(self._folder)
                end_orphans()  # what a raylet that died has left
                break
            time.sleep(0.05)
