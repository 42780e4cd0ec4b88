"""The nodes of a Ray cluster: whether all are there and alike, and the place that each engine gets on them.

Everything is checked before a model loads: a load takes minutes, and its failure would not name the node.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.config import ClusterConfig, Problem
from ctpo_megatron.engines.tasks import LOG_MARK, EngineError, EngineSpec

NODE_POLL_S = 0.5
"""How often a missing Ray head or node is looked for."""
_STRATEGIES = {"spread": "SPREAD", "packed": "PACK"}


NodeCheck = Callable[[bool, bool], list[str]]
"""Ray sends it to every node and calls it there. It returns what prevents the node from working with the trainer's.

Its arguments are whether the node has room for engines, and whether these need a sandbox of their node.
"""


@dataclass(frozen=True)
class RayCluster:
    """The Ray cluster that RAY_ADDRESS names. settings: section `cluster`. check: every node has to pass it."""

    settings: ClusterConfig
    check: NodeCheck


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


def living_nodes() -> list[Node]:
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


def listed(nodes: Sequence[Node]) -> str:
    """Addresses and resources, separated by commas."""
    return ", ".join(map(str, nodes))


def described(resources: Mapping[str, float]) -> str:
    """`1 CPU and 0 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


class EngineGroup:
    """A Ray placement group with one bundle for each engine.

    A bundle outlives its engine, and holds the next one. Ray moves the bundles of a node that died to another node.

    spec: of the engines, with absolute paths that are valid on every node.
    """

    def __init__(self, spec: EngineSpec, count: int, cluster: RayCluster, deadline: float) -> None:
        """Raises EngineError when nodes are missing, differ, or have no place, by `deadline` (monotonic seconds).

        No model loads before all of these checks have passed.
        """
        nodes = _await_nodes(cluster.settings, deadline)
        _check_nodes(nodes, spec, cluster.check, deadline)
        self._group = _reserve(count, spec.resources, nodes, cluster.settings, deadline)
        folders = tuple(str(Path(folder).resolve()) for folder in spec.config.extensions.path or ())
        extensions = spec.config.extensions.model_copy(update={"path": folders})
        config = spec.config.model_copy(update={"extensions": extensions})
        self.spec = replace(spec, config=config, log_mark=uuid.uuid4().hex)
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        (spec.log_dir / LOG_MARK).write_text(self.spec.log_mark, encoding="utf-8")

    def options(self, index: int) -> dict[str, Any]:
        """Options of a Ray actor that place it in bundle number `index`."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def close(self) -> None:
        """Remove the placement group."""
        (self.spec.log_dir / LOG_MARK).unlink(missing_ok=True)
        remove_placement_group(self._group)


def _await_nodes(cluster: ClusterConfig, deadline: float) -> list[Node]:
    """Wait for `cluster.nodes` nodes; more are refused."""
    while len(nodes := living_nodes()) < cluster.nodes:
        if time.monotonic() + NODE_POLL_S > deadline:
            raise EngineError(
                f"{len(nodes)} of {cluster.nodes} Ray nodes (cluster.nodes) are there: {listed(nodes)}. Check why Ray "
                f"did not start on the other nodes, or set cluster.nodes={len(nodes)}"
            )
        time.sleep(NODE_POLL_S)
    if len(nodes) > cluster.nodes:
        raise EngineError(
            f"{len(nodes)} Ray nodes are there: {listed(nodes)}; cluster.nodes is {cluster.nodes}. Set "
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
    wanted = f"{count} engines of {described(resources)} each (cluster.engine_placement: {cluster.engine_placement})"
    there = "\n  ".join(map(str, nodes))
    if sum(node.holds(resources) for node in nodes) < count:
        raise EngineError(f"no place for {wanted}; the cluster has\n  {there}")
    bundle = {name: float(amount) for name, amount in resources.items() if amount}
    group: PlacementGroup = placement_group([bundle] * count, strategy=_STRATEGIES[cluster.engine_placement])
    if not group.wait(max(0.0, deadline - time.monotonic())):
        remove_placement_group(group)
        free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        unused = described({name: free.get(name, 0) for name in resources})
        raise EngineError(
            f"no place became free for {wanted}; unused of all nodes: {unused}; the cluster has\n  {there}"
        )
    return group
