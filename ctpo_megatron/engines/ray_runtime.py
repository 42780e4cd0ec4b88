"""The Ray of the engines: a private, quiet one, or the cluster that RAY_ADDRESS names, and their places on its nodes.

Any process that reaches a Ray node can run code on it, so several nodes need Ray's token authentication (SECURITY.md).
Nodes are checked before a model loads: a load takes minutes, and its failure would not name the node.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ctpo_megatron.base.addresses import is_own
from ctpo_megatron.base.cuda_environment import of_this_rank
from ctpo_megatron.base.processes import end_all, runs
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, QUIET, TOKEN, TOKEN_FILE
from ctpo_megatron.base.ray_orphans import PARENT, PREFIX, end_orphans
from ctpo_megatron.base.stop import action_kept, children_spared
from ctpo_megatron.config import ClusterConfig, Problem
from ctpo_megatron.engines.tasks import EngineError, EngineSpec
from ctpo_sandbox import temporary

NodeCheck = Callable[[bool, bool], list[str]]
"""Ray sends it to every node and calls it there. It returns what prevents the node from working with the trainer's.

Its arguments are whether the node has room for engines, and whether these need a sandbox of their node.
"""
_NODE_POLL_S = 0.5
"""How often a missing Ray head or node is looked for."""
_HEAD_CONNECT_S = 5.0
"""One attempt to connect to Ray's head."""
_CLOSE_S = 50.0
"""For a start that is under way to end, and for the shutdown, in a thread of their own."""
_START_MARGIN_S = 5.0
"""`RayRuntime.is_up` waits so much longer than Ray itself, whose error names the cause."""
_KILLED_S = 10.0
"""For killed processes of a private Ray to end: the kernel frees their memory first."""
_LAST_PORT = 65535
_STRATEGIES = {"spread": "SPREAD", "packed": "PACK"}
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
            if time.monotonic() + _NODE_POLL_S > deadline:
                raise EngineError(f"{ADDRESS}={address}: Ray's head does not answer: {error}") from error
            if not warned:
                warned = True
                log.warning(
                    "%s=%s: Ray's head does not answer (%s); waiting for it, %.0f s at most (rollout.start_timeout_s). "
                    "Type unset %s for engines on this machine alone",
                    *(ADDRESS, address, error, left_s, ADDRESS),
                )
        time.sleep(_NODE_POLL_S)


class RayRuntime:
    """Starts Ray when constructed, then calls `then(number of GPUs)`; `is_up` reports the result.

    All of it happens in a thread of its own that lives until `close`. So the caller continues meanwhile and keeps its
    signal handlers. The kernel kills the processes of a private Ray when the thread that started them ends, so Ray
    ends with this process however that ends.
    """

    def __init__(
        self,
        cpus: int,
        then: Callable[[float], None],
        gpus: str | None = None,
        cluster: ClusterConfig | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """gpus: what a private Ray sees, as in `CUDA_VISIBLE_DEVICES`; None: all GPUs of this process.

        cluster: of the cluster of RAY_ADDRESS, which is joined within `timeout_s`; None starts a private Ray.
        """
        self._cpus, self._then, self._gpus = cpus, then, gpus
        self._cluster, self._deadline = cluster, time.monotonic() + timeout_s
        self._folder: Path | None = None
        self._ours = not ray.is_initialized()
        self._daemons: dict[str, psutil.Process] = {}
        self._up, self._closing = Future[None](), threading.Event()
        self._keeper = threading.Thread(target=self._run, name="ray-keeper", daemon=True)
        self._keeper.start()

    def is_up(self) -> bool:
        """Whether `then` has run.

        Raises what Ray or `then` raised, TimeoutError when it is late, EngineError when Ray's processes have died.
        """
        if self._up.done():
            self._up.result()
            return True
        self._find_daemons()
        if lost := self.lost(starting=True):
            raise EngineError(lost)
        if time.monotonic() < self._deadline + _START_MARGIN_S:
            return False
        where = f"its logs: {self._folder}"
        if self._cluster is not None:
            where = f"is there a Ray node of RAY_ADDRESS={os.environ.get(ADDRESS)} on this machine?"
        raise TimeoutError(f"Ray is not up in time; {where}")

    def lost(self, *, starting: bool) -> str:
        """Return which process of a private Ray has died that engines need; "" for none, and for a cluster.

        Without its GCS Ray notices no loss of an engine. starting: engines are to start, which needs its raylet, too.
        """
        for name in ("gcs_server", "raylet") if starting else ("gcs_server",):
            process = self._daemons.get(name)
            if process is not None and not runs(process):
                return f"Ray's {_DAEMONS[name]} (process {process.pid}) died"
        return ""

    def _find_daemons(self) -> None:
        """Note the GCS and the raylet as Ray starts them; it waits for ever for one that dies meanwhile."""
        if self._ours and self._cluster is None:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if (name := child.name()) in _DAEMONS:
                        self._daemons.setdefault(name, child)

    def close(self) -> None:
        """Shut Ray down if this object started or joined it. Idempotent."""
        self._closing.set()
        if self.lost(starting=True) and not self._up.done():  # the thread may wait for Ray's processes for ever
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
            return join_ray(self._cluster, self._deadline)
        # Unix socket paths are limited to about 100 characters, so TMPDIR is not used.
        self._folder = temporary.new_folder(PREFIX, PARENT)
        # Only Ray's processes see the change: this one read CUDA_VISIBLE_DEVICES when it initialized CUDA.
        changes = dict.fromkeys(of_this_rank()) | _token(self._folder) | _RECONNECT
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


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster. cpus, gpus: its total resources, used or not."""

    id: str
    address: str
    cpus: float
    gpus: float

    def holds(self, resources: Mapping[str, int]) -> int:
        """How many engines that need these `CPU` and `GPU` fit on it."""
        totals = {"CPU": self.cpus, "GPU": self.gpus}
        return min(int(totals[name] // amount) for name, amount in resources.items() if amount)

    def __str__(self) -> str:
        return f"{self.address} ({self.cpus:g} CPU, {self.gpus:g} GPU)"


def _living_nodes() -> list[Node]:
    """The nodes that Ray reports as alive, sorted by address."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    living = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in nodes
        if node["Alive"]
    ]
    return sorted(living, key=lambda node: node.address)


def _listed(nodes: Sequence[Node]) -> str:
    """Addresses and resources, separated by commas."""
    return ", ".join(map(str, nodes))


def _described(resources: Mapping[str, float]) -> str:
    """`1 CPU and 0 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


class EnginePlaces:
    """A Ray placement group with one bundle for each engine; as a string, the nodes that are there.

    A bundle outlives its engine, and holds the next one. Ray moves the bundles of a node that died to another node.
    """

    def __init__(self, spec: EngineSpec, count: int, check: NodeCheck, deadline: float) -> None:
        """Raises EngineError when nodes are missing, differ, or have no place, by `deadline` (monotonic seconds).

        No model loads before all of these checks have passed.
        """
        cluster = spec.config.cluster
        nodes = _await_nodes(cluster, deadline)
        _check_nodes(nodes, spec, check, deadline)
        self._group = _reserve(count, spec.resources, nodes, cluster, deadline)

    def __str__(self) -> str:
        return f"the cluster has {_listed(_living_nodes())}"

    def options(self, index: int) -> dict[str, Any]:
        """Options of a Ray actor that place it in bundle number `index`."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def close(self) -> None:
        """Remove the placement group."""
        remove_placement_group(self._group)


def _await_nodes(cluster: ClusterConfig, deadline: float) -> list[Node]:
    """Wait for `cluster.nodes` nodes; more are refused."""
    while len(nodes := _living_nodes()) < cluster.nodes:
        if time.monotonic() + _NODE_POLL_S > deadline:
            raise EngineError(
                f"{len(nodes)} of {cluster.nodes} Ray nodes (cluster.nodes) are there: {_listed(nodes)}. Check why Ray "
                f"did not start on the other nodes, or set cluster.nodes={len(nodes)}"
            )
        time.sleep(_NODE_POLL_S)
    if len(nodes) > cluster.nodes:
        raise EngineError(
            f"{len(nodes)} Ray nodes are there: {_listed(nodes)}; cluster.nodes is {cluster.nodes}. Set "
            f"cluster.nodes={len(nodes)}, or join another cluster ({ADDRESS}={os.environ.get(ADDRESS)})"
        )
    return nodes


def _check_nodes(nodes: Sequence[Node], spec: EngineSpec, check: NodeCheck, deadline: float) -> None:
    """Call the check on all nodes at once; refuse them with all problems of all nodes."""
    remote: Any = ray.remote(lambda *needs: check(*needs))
    answers = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        call = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        answers.append(call.remote(node.holds(spec.resources) > 0, spec.sandbox_url is None))
    problems: list[Problem] = []
    for node, answer in zip(nodes, answers, strict=True):
        try:
            texts = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
        except GetTimeoutError:
            texts = ["did not answer in time (rollout.start_timeout_s); Ray's logs of that node may tell why"]
        except RayError as error:
            texts = [f"could not be asked: {str(error).strip().splitlines()[-1]}"]
        problems += [Problem("", text, where=node.address) for text in texts]
    if problems:
        raise EngineError("\n  ".join([f"{len(problems)} problems of the Ray nodes:", *map(str, problems)]))


def _reserve(
    count: int, resources: Mapping[str, int], nodes: Sequence[Node], cluster: ClusterConfig, deadline: float
) -> PlacementGroup:
    wanted = f"{count} engines of {_described(resources)} each (cluster.engine_placement: {cluster.engine_placement})"
    there = "\n  ".join(map(str, nodes))
    if sum(node.holds(resources) for node in nodes) < count:
        raise EngineError(f"no place for {wanted}; the cluster has\n  {there}")
    bundle = {name: float(amount) for name, amount in resources.items() if amount}
    group: PlacementGroup = placement_group([bundle] * count, strategy=_STRATEGIES[cluster.engine_placement])
    if not group.wait(max(0.0, deadline - time.monotonic())):
        remove_placement_group(group)
        free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        unused = _described({name: free.get(name, 0) for name in resources})
        raise EngineError(
            f"no place became free for {wanted}; unused of all nodes: {unused}; the cluster has\n  {there}"
        )
    return group
