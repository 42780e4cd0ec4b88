"""The Ray of the engines: a private, quiet one, or the cluster that RAY_ADDRESS names, and their places on its nodes.

Any process that reaches a Ray node can run code on it, so several nodes need Ray's token authentication (SECURITY.md).
Nodes are checked before a model loads: a load takes minutes, and its failure would not name the node.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ctpo_megatron.base.addresses import is_own
from ctpo_megatron.base.cuda_environment import of_this_rank
from ctpo_megatron.base.processes import end_all, runs
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, PARENT, PREFIX, QUIET, TOKEN, TOKEN_FILE
from ctpo_megatron.base.stop import action_kept, children_spared
from ctpo_megatron.config import ClusterConfig, Config, Problem, engine_count
from ctpo_megatron.engines.engine import EngineError, EngineSpec
from ctpo_sandbox import temporary

NodeCheck = Callable[[bool, bool], list[str]]
"""Ray sends it to every node and calls it there. It returns what prevents the node from working with the trainer's.

Its arguments are whether the node has room for engines, and whether these need a sandbox of their node.
"""
_NODE_POLL_S = 0.5
"""How often a missing Ray node is looked for."""
_WATCH_S = 1.0
"""How often the processes of a private Ray are looked at."""
_HEAD_S = 5.0
"""For Ray's head to accept a connection."""
_CLOSE_S = 50.0
"""For a start that is under way to end, and for the shutdown."""
_KILLED_S = 10.0
"""For killed processes of a private Ray to end: the kernel frees their memory first."""
_OBJECT_STORE_BYTES = 256 << 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_IDLE = {"monitor.py", "log_monitor.py"}
"""Programs of Ray that scale a cluster and send output of workers: 100 MiB. Options of `ray start` leave them out, and
`ray.init` has none for it."""
_INLINE_BYTES = str(256 << 20)
_QUIET = {
    **QUIET,
    # Without its GCS Ray ends a process, by `_exit`, after this time in seconds: a minute by its default, in which the
    # run could not save. Agents of a killed run stay for as long.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
_OF_CLUSTER = {**_QUIET, AUTH_MODE: "disabled"}
_OF_PRIVATE = {
    **_QUIET,
    "RAY_health_check_failure_threshold": "100000",  # otherwise engines end seconds after a raylet that died
    # Objects of any usual size go past the store, which is a part of the raylet.
    "RAY_max_direct_call_object_size": _INLINE_BYTES,
    "RAY_task_rpc_inlined_bytes_limit": _INLINE_BYTES,
}

log = logging.getLogger(__name__)


class RayRuntime:
    """Starts Ray, or joins it, when constructed.

    started: the number of its GPUs, or what Ray has raised. lost: what has died of a private Ray that engines need.

    It happens in a thread of its own that lives until `close`. So the caller continues meanwhile and keeps its signal
    handlers. The kernel kills the processes of a private Ray when the thread that started them ends, so Ray ends with
    this process however that ends.
    """

    def __init__(self, cpus: int, gpus: str | None = None, cluster: ClusterConfig | None = None) -> None:
        """cpus, gpus: what a private Ray has, as in `CUDA_VISIBLE_DEVICES`; None: all GPUs of this process. cluster: of
        the cluster of RAY_ADDRESS, which is joined; None starts a private Ray.
        """
        self._cpus, self._gpus, self._cluster = cpus, gpus, cluster
        self.folder: Path | None = None  # of a private Ray
        self.started, self.lost, self._closing = Future[float](), Future[str](), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut Ray down if this object started or joined it. Idempotent."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        self.started.set_running_or_notify_cancel()  # a waiter that is cancelled leaves it alone
        ours = not ray.is_initialized()
        try:
            with action_kept(signal.SIGTERM):  # Ray would print a trace of C++ before the run's own message
                self._connect(ours)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.started.set_exception(error)
        else:
            self.started.set_result(float(resources.get("GPU", 0.0)))
            self._watch()
        self._closing.wait()
        self._kill_processes()
        if ours:
            ray.shutdown()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _connect(self, ours: bool) -> None:
        for name, value in (_OF_CLUSTER if self._cluster else _OF_PRIVATE).items():
            os.environ.setdefault(name, value)
        logging.getLogger("ray").setLevel(logging.ERROR)
        if not ours:
            return
        if self._cluster is not None:
            return join_ray(self._cluster)
        # Unix socket paths are limited to about 100 characters, so TMPDIR is not used.
        self.folder = temporary.new_folder(PREFIX, PARENT)
        # Only Ray's processes see the change: this one read CUDA_VISIBLE_DEVICES when it initialized CUDA.
        changes = dict.fromkeys(of_this_rank()) | _token(self.folder)
        changes |= {} if self._gpus is None else {_VISIBLE: self._gpus}
        # A signal to the process group must spare Ray's head: the trainer needs it until it has saved its state.
        with _variables(changes), children_spared():
            ray.init(
                address="local",
                num_cpus=self._cpus,
                num_gpus=None if self._gpus is None else len(self._gpus.split(",")),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self.folder / "ray"),  # all users may write there, so it lies in a private folder
            )
        idle = [each for each in self._processes() if _IDLE & {Path(word).name for word in each.info["cmdline"]}]
        end_all(idle, _KILLED_S)

    def _processes(self) -> list[psutil.Process]:
        """Return the processes that this one has started for a private Ray; what its raylet has started is below."""
        running = [] if self.folder is None else psutil.process_iter(["name", "cmdline"])
        return [each for each in running if str(self.folder) in " ".join(each.info["cmdline"] or ())]

    def _watch(self) -> None:
        """Tell of a daemon that dies, until `close`: Ray itself would notice no loss of an engine, and start none."""
        daemons = [each for each in self._processes() if each.info["name"] in ("gcs_server", "raylet")]
        while daemons and not self._closing.wait(_WATCH_S):
            for dead in [each for each in daemons if not runs(each)]:
                return self.lost.set_result(f"Ray's {dead.info['name']} (process {dead.pid}) died")

    def _kill_processes(self) -> None:
        """Kill a private Ray, but for its GCS, which the shutdown asks and ends.

        Ray itself would give each of its processes a second to end, and leave some of engines.
        """
        family = [each for each in self._processes() if each.info["name"] != "gcs_server"]
        for process in list(family):
            with suppress(psutil.NoSuchProcess):
                family += process.children(recursive=True)
        if left := end_all(family, _KILLED_S):
            log.warning("still running %g s after SIGKILL, as Ray ended: %s", _KILLED_S, ", ".join(map(str, left)))


def begin_ray(config: Config) -> AbstractContextManager[RayRuntime]:
    """Begin to start the private Ray of a run on CPUs, which takes seconds, before its engines can be opened."""
    return closing(RayRuntime(engine_count(config) * config.rollout.engine.threads))


@contextmanager
def _variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for processes that are started within; None unsets one. All are restored at the end."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
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


def join_ray(cluster: ClusterConfig) -> None:
    """Connect this process to the cluster of RAY_ADDRESS.

    Raises EngineError when its head does not answer or refuses, when several nodes have no token, and when
    `cluster.node_address` is not this machine's.
    """
    if cluster.nodes > 1:
        _check_token(cluster.nodes)
    if cluster.node_address is not None and not is_own(cluster.node_address):  # Ray would look for it for minutes
        raise EngineError(f"cluster.node_address={cluster.node_address} is no address of this machine")
    address = os.environ[ADDRESS]
    if address != "auto":
        _check_head(address)
    try:
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
    mode, path = os.environ.get(AUTH_MODE), os.environ.get(TOKEN_FILE)
    if mode is None or mode.lower() != "token" or path is None or not Path(path).is_file():
        problem = f"{AUTH_MODE}={mode} and {TOKEN_FILE}={path} name no file with a secret"
    elif Path(path).stat().st_mode & 0o077:
        problem = f"{TOKEN_FILE}={path} can be read or written by other users; type chmod 600 {path}"
    elif os.environ.get(TOKEN):
        problem = f"{TOKEN} is set, which every program of the node inherits: unset it"
    else:
        return
    raise EngineError(
        f"{problem}. {nodes} Ray nodes (cluster.nodes) run code for anyone who can connect. On every node, before "
        f"`ray start`: export {AUTH_MODE}=token {TOKEN_FILE}=FILE, with the same secret in FILE, of mode 0600"
    )


def _check_head(address: str) -> None:
    """Raise EngineError where Ray's head does not accept a connection: the address may be an old one."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        raise EngineError(f"{ADDRESS}={address}: give HOST:PORT of Ray's head; Ray Client is not supported")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _HEAD_S).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"{ADDRESS}={address}: Ray's head does not answer ({error}): start it first, or type unset {ADDRESS} for "
            "engines on this machine alone"
        ) from error


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster. total: its CPUs and GPUs, used or not."""

    id: str
    address: str
    total: Mapping[str, float]

    def holds(self, resources: Mapping[str, int]) -> int:
        """Return how many engines that need these `CPU` and `GPU` fit on it."""
        return min(int(self.total.get(name, 0.0) // amount) for name, amount in resources.items() if amount)

    def __str__(self) -> str:
        return f"{self.address} ({self.total.get('CPU', 0.0):g} CPU, {self.total.get('GPU', 0.0):g} GPU)"


async def find_places(spec: EngineSpec, count: int, check: NodeCheck, deadline: float) -> list[str]:
    """Return the ids of the cluster's nodes on which to start `count` engines; Ray may have to choose others later.

    Raises EngineError when nodes are missing by `deadline` (seconds of the event loop), differ, or have no place.
    """
    cluster = spec.config.cluster
    nodes = await _nodes(cluster.nodes, deadline)
    await _check_nodes(nodes, spec, check, deadline)
    rooms = [[node.id] * node.holds(spec.resources) for node in nodes]
    if cluster.engine_placement == "spread":  # one on each node, then a second one
        rooms = [[place for place in row if place] for row in zip_longest(*rooms)]
    else:
        rooms.sort(key=len, reverse=True)
    places = [place for room in rooms for place in room]
    if len(places) < count:
        needs = " and ".join(f"{amount} {name}" for name, amount in spec.resources.items())
        there = "\n  ".join(map(str, nodes))
        raise EngineError(f"no place for {count} engines of {needs} each; the cluster has\n  {there}")
    return places[:count]


async def _nodes(count: int, deadline: float) -> list[Node]:
    """Wait for `count` living nodes, sorted by address; more are refused."""
    while True:
        found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [Node(n["NodeID"], n["NodeManagerAddress"], n["Resources"]) for n in found if n["Alive"]]
        nodes.sort(key=lambda node: node.address)
        if len(nodes) == count:
            return nodes
        if len(nodes) > count or asyncio.get_running_loop().time() > deadline:
            raise EngineError(
                f"{len(nodes)} Ray nodes are there, and cluster.nodes is {count}: {', '.join(map(str, nodes))}. Check "
                f"why Ray did not start on the others, set cluster.nodes={len(nodes)}, or join another cluster "
                f"({ADDRESS}={os.environ.get(ADDRESS)})"
            )
        await asyncio.sleep(_NODE_POLL_S)


async def _check_nodes(nodes: Sequence[Node], spec: EngineSpec, check: NodeCheck, deadline: float) -> None:
    """Call the check on all nodes at once; refuse them with all problems of all nodes."""
    remote: Any = ray.remote(lambda *needs: check(*needs))

    async def ask(node: Node) -> list[Problem]:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        call = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        try:
            async with asyncio.timeout_at(deadline):
                texts = await call.remote(node.holds(spec.resources) > 0, spec.sandbox_url is None)
        except TimeoutError:
            texts = ["did not answer in time (rollout.start_timeout_s); Ray's logs of that node may tell why"]
        except RayError as error:
            texts = [f"could not be asked: {str(error).strip().splitlines()[-1]}"]
        return [Problem("", text, where=node.address) for text in texts]

    problems = [problem for found in await asyncio.gather(*map(ask, nodes)) for problem in found]
    if problems:
        raise EngineError("\n  ".join([f"{len(problems)} problems of the Ray nodes:", *map(str, problems)]))
