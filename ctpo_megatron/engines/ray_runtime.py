"""A private, quiet Ray instance for the rollout side, or a connection to the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil

from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, QUIET, TOKEN_FILE
from ctpo_megatron.base.signals import children_spared
from ctpo_megatron.config import ClusterConfig
from ctpo_megatron.engines.cluster import join

_OBJECT_STORE_BYTES = 256 << 20
_JOIN_TIMEOUT_S = 30.0
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_OF_CLUSTER = {**QUIET, AUTH_MODE: "disabled"}
_OF_PRIVATE = {
    **QUIET,
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # how long orphaned agents linger after a killed driver
}


@contextmanager
def _variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Processes that are started inside have these variables; None: as it is. Afterwards all are what they were."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


@cache
def _secret() -> str:
    """The secret of every private Ray of this process, since Ray reads it only once."""
    return secrets.token_hex(32)


def _token(directory: Path) -> dict[str, str | None]:
    """Variables for a Ray that requires `_secret`; none if the user has set RAY_AUTH_MODE.

    A process that has imported Ray sets that in vain. `ray.init` does it, where it is not set.
    """
    if AUTH_MODE in os.environ:
        return {}
    file = directory / "token"
    file.touch(0o600)
    file.write_text(_secret(), encoding="utf-8")
    return {AUTH_MODE: None, TOKEN_FILE: str(file)}


def _shut_down() -> None:
    """Ray's shutdown without its waits: it sends SIGTERM to one process after another, and gives each a second.

    Those that started within `children_spared` never act on it. What a killed process has started is killed, too.
    """
    import ray

    node = ray._private.worker._global_node
    assert node is not None  # a Ray of this process
    started = [each.process for kind in node.all_processes.values() for each in kind]
    below: list[psutil.Process] = []
    for process in started:
        process.terminate = process.kill
        with suppress(psutil.NoSuchProcess):
            below += psutil.Process(process.pid).children(recursive=True)
    ray.shutdown()
    for process in below:
        with suppress(psutil.NoSuchProcess):  # most end by themselves
            process.kill()


class RayRuntime:
    """Starts Ray in the background when constructed, then calls `then(gpus of the cluster)`; `wait` raises failures.

    This happens in a thread that lives until `close`, so the caller continues meanwhile and keeps its signal handlers.
    The kernel kills a local Ray's processes with the thread that started them, so they always end with this process.
    """

    def __init__(
        self,
        cpus: int,
        then: Callable[[float], None],
        gpus: str | None = None,
        cluster: ClusterConfig | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """gpus: the only ones that a private Ray sees, as in `CUDA_VISIBLE_DEVICES`; None: all of this process.

        cluster: of RAY_ADDRESS, which is joined within `timeout_s`; None: Ray is private.
        """
        self._cpus, self._then, self._gpus = cpus, then, gpus
        self._cluster, self._deadline = cluster, time.monotonic() + timeout_s
        self._temp: Path | None = None
        self._owner = False
        self._error: BaseException | None = None
        self._up, self._closing = threading.Event(), threading.Event()
        self._keeper = threading.Thread(target=self._run, name="ray-keeper", daemon=True)
        self._keeper.start()

    def is_up(self) -> bool:
        """Whether `then` has run; raises what Ray or `then` raised."""
        if self._error is not None:
            raise self._error
        return self._up.is_set()

    def wait(self, timeout_s: float) -> None:
        """Return once `then` has run; raises what Ray or `then` raised, TimeoutError when it takes longer."""
        if not self._up.wait(timeout_s):
            where = f"its logs: {self._temp}"
            if self._cluster is not None:
                where = f"is there a Ray node of RAY_ADDRESS={os.environ.get(ADDRESS)} on this machine?"
            raise TimeoutError(f"Ray is not up after {timeout_s:.0f} s; {where}")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Shut Ray down if this object started or joined it. Idempotent."""
        self._closing.set()
        self._keeper.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._connect()
            import ray

            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            self._then(float(resources.get("GPU", 0.0)))
        except BaseException as error:  # raised by `wait`
            self._error = error
        self._up.set()
        while not self._closing.wait(3600.0):
            pass
        self._disconnect()

    def _connect(self) -> None:
        defaults = _OF_CLUSTER if self._cluster else _OF_PRIVATE
        for name, value in defaults.items():
            os.environ.setdefault(name, value)
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        if ray.is_initialized():
            return
        self._owner = True
        if self._cluster is not None:
            join(self._cluster, self._deadline)
            return
        # Unix socket paths are limited to about 100 characters, so TMPDIR is not used.
        self._temp = Path(tempfile.mkdtemp(prefix="ctpo-ray-", dir="/tmp"))
        count = None if self._gpus is None else len(self._gpus.split(","))
        # This process has read CUDA_VISIBLE_DEVICES when it initialized CUDA.
        changes = {_VISIBLE: self._gpus, **_token(self._temp)}
        # Without Ray's head the trainer is ended before it has saved its state.
        with _variables(changes), children_spared():
            ray.init(
                address="local",
                num_cpus=self._cpus,
                num_gpus=count,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp / "ray"),  # which anyone may write to
            )

    def _disconnect(self) -> None:
        import ray

        if self._owner and ray.is_initialized():
            if self._temp is None:  # a cluster's processes are not ours to end
                ray.shutdown()
            else:
                _shut_down()
        for _ in range(20):  # Ray's processes may still be writing their last log lines
            if self._temp is None or not self._temp.exists():
                break
            shutil.rmtree(self._temp, ignore_errors=True)
            time.sleep(0.05)
