"""The Ray cluster that RAY_ADDRESS names: how it is joined, and what it must be like before anything loads.

Anyone who can reach a Ray node can run code on it, so several nodes need Ray's token authentication (SECURITY.md).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ctpo_megatron.base.addresses import is_own
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, TOKEN, TOKEN_FILE
from ctpo_megatron.config import ClusterConfig, Problem
from ctpo_megatron.engines.node_facts import Facts, Needs, differences, node_facts

_POLL_S = 0.5
_ANSWER_S = 5.0
_LAST_PORT = 65535

log = logging.getLogger(__name__)


class ClusterError(Exception):
    """The Ray cluster cannot be joined or used; the message names what is missing, and on which node."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node of the cluster; cpus and gpus: all that it has, used or not."""

    id: str
    address: str
    cpus: float
    gpus: float

    def holds(self, resources: Mapping[str, int]) -> int:
        """How many engines of these `CPU` and `GPU` fit into it."""
        totals = {"CPU": self.cpus, "GPU": self.gpus}
        return min(int(totals[name] // amount) for name, amount in resources.items() if amount)

    def __str__(self) -> str:
        return f"{self.address} ({self.cpus:g} CPU, {self.gpus:g} GPU)"


def living_nodes() -> list[Node]:
    """The nodes that Ray's head has heard of lately, by address."""
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


def check_token(nodes: int, environment: Mapping[str, str]) -> None:
    """Raises ClusterError when several nodes have no authentication."""
    if nodes == 1:
        return
    path = environment.get(TOKEN_FILE)
    advice = (
        f"{nodes} Ray nodes (cluster.nodes) run code for anyone who reaches them. On every node, before `ray start`: "
        f"export {AUTH_MODE}=token {TOKEN_FILE}=FILE, with the same secret in FILE, of mode 0600"
    )
    if environment.get(AUTH_MODE, "").lower() != "token" or not path:
        raise ClusterError(f"{AUTH_MODE}={environment.get(AUTH_MODE)}, {TOKEN_FILE}={path}: {advice}")
    if environment.get(TOKEN):
        raise ClusterError(f"{TOKEN} is set, which every program of the node inherits: unset it. {advice}")
    if not Path(path).is_file():
        raise ClusterError(f"{TOKEN_FILE}={path} is no file: {advice}")
    if Path(path).stat().st_mode & 0o077:
        raise ClusterError(f"{TOKEN_FILE}={path} can be read or written by other users; type chmod 600 {path}")


def await_head(address: str, deadline: float) -> None:
    """Return when something answers at Ray's address, and say so if that takes time.

    Raises ClusterError at `deadline` (monotonic seconds).
    """
    if "://" in address:
        raise ClusterError(f"{ADDRESS}={address}: Ray Client is not supported; give HOST:PORT of Ray's head")
    host, separator, port = address.rpartition(":")
    if not separator:  # "auto"
        return
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ClusterError(f"{ADDRESS}={address}: {port!r} is no port; give HOST:PORT of Ray's head")
    told = False
    while True:
        try:
            left_s = max(1.0, deadline - time.monotonic())
            socket.create_connection((host.strip("[]"), int(port)), timeout=min(left_s, _ANSWER_S)).close()
            return
        except OSError as error:
            if time.monotonic() + _POLL_S > deadline:
                raise ClusterError(f"{ADDRESS}={address}: Ray's head does not answer: {error}") from error
            if not told:
                told = True
                log.warning(
                    "%s=%s: Ray's head does not answer (%s); waiting for it, %.0f s at most (rollout.start_timeout_s). "
                    "Type unset %s for engines on this machine alone",
                    *(ADDRESS, address, error, left_s, ADDRESS),
                )
        time.sleep(_POLL_S)


def check_address(address: str | None) -> None:
    """Raises ClusterError when `cluster.node_address` is not this machine's: Ray would look for it for minutes."""
    if address is not None and not is_own(address):
        raise ClusterError(f"cluster.node_address={address} is no address of this machine")


def join(cluster: ClusterConfig, deadline: float) -> None:
    """Connect this process to the cluster of RAY_ADDRESS. Raises ClusterError, by `deadline` (monotonic)."""
    check_token(cluster.nodes, os.environ)
    check_address(cluster.node_address)
    address = os.environ[ADDRESS]
    await_head(address, deadline)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=cluster.node_address,
        )
    except (ConnectionError, RuntimeError, RayError) as error:
        cause = error.__cause__ or error
        where = cluster.node_address or "any of this machine's addresses"
        raise ClusterError(
            f"cannot join the Ray cluster at {address} through a Ray node of this machine at {where} "
            f"(cluster.node_address): {cause}"
        ) from error


def await_nodes(cluster: ClusterConfig, deadline: float) -> list[Node]:
    """All nodes, once there are `cluster.nodes`. Raises ClusterError at `deadline`, and when there are more."""
    while len(nodes := living_nodes()) < cluster.nodes:
        if time.monotonic() + _POLL_S > deadline:
            raise ClusterError(
                f"{len(nodes)} of {cluster.nodes} Ray nodes (cluster.nodes) are there: {listed(nodes)}. Check why Ray "
                f"did not start on the other nodes, or set cluster.nodes={len(nodes)}"
            )
        time.sleep(_POLL_S)
    if len(nodes) > cluster.nodes:
        raise ClusterError(
            f"{len(nodes)} Ray nodes are there: {listed(nodes)}; cluster.nodes is {cluster.nodes}. Set "
            f"cluster.nodes={len(nodes)}, or join another cluster ({ADDRESS}={os.environ.get(ADDRESS)})"
        )
    return nodes


def check_nodes(nodes: Sequence[Node], resources: Mapping[str, int], needs: Needs, deadline: float) -> None:
    """Raises one ClusterError with all that differs between nodes, or is missing where engines can be placed."""
    asked = [needs if node.holds(resources) else None for node in nodes]
    answers = _ask(nodes, asked, deadline)
    here = node_facts(Needs(needs.model_path, needs.folders, sandbox=False))
    problems = [
        problem
        for node, answer in zip(nodes, answers, strict=True)
        for problem in ([answer] if isinstance(answer, Problem) else differences(here, answer, needs, node.address))
    ]
    if problems:
        raise ClusterError("\n  ".join([f"{len(problems)} problems of the Ray nodes:", *map(str, problems)]))


def _ask(nodes: Sequence[Node], needs: Sequence[Needs | None], deadline: float) -> list[Facts | Problem]:
    """The facts of each node, or why there are none."""
    remote: Any = ray.remote(node_facts)
    pending = [
        remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(wanted)
        for node, wanted in zip(nodes, needs, strict=True)
    ]
    answers: list[Facts | Problem] = []
    for node, reference in zip(nodes, pending, strict=True):
        try:
            answers.append(ray.get(reference, timeout=max(1.0, deadline - time.monotonic())))
        except GetTimeoutError:
            message = "did not answer in time (rollout.start_timeout_s); Ray's logs of that node may tell why"
            answers.append(Problem("", message, where=node.address))
        except RayError as error:
            message = f"could not be asked: {str(error).strip().splitlines()[-1]}"
            answers.append(Problem("", message, where=node.address))
    return answers


def listed(nodes: Sequence[Node]) -> str:
    """Addresses and sizes."""
    return ", ".join(str(node) for node in nodes)


def described(resources: Mapping[str, float]) -> str:
    """`1 CPU and 0 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
