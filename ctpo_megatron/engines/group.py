"""A Ray placement group with one bundle for each engine. A bundle outlives its engine, and holds the next one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ctpo_megatron.config import ClusterConfig
from ctpo_megatron.engines.cluster import ClusterError, Node, await_nodes, check_nodes, described
from ctpo_megatron.engines.logs import LogCollector, mark, unmark
from ctpo_megatron.engines.node_facts import Needs
from ctpo_megatron.engines.tasks import EngineSpec

_STRATEGIES = {"spread": "SPREAD", "packed": "PACK"}


class EngineGroup:
    """Placement and log copies of all engines. Ray moves the bundles of a node that died to another node.

    spec: of the engines, with absolute paths that are valid on every node.
    """

    def __init__(self, spec: EngineSpec, count: int, cluster: ClusterConfig, deadline: float) -> None:
        """Raises ClusterError when nodes are missing, differ, or have no place, by `deadline` (monotonic seconds).

        No model loads before all of these checks have passed.
        """
        folders = tuple(str(Path(folder).resolve()) for folder in spec.config.extensions.path or ())
        nodes = await_nodes(cluster, deadline)
        check_nodes(nodes, spec.resources, Needs(spec.model_path, folders, spec.sandbox_url is None), deadline)
        self._group = _reserve(count, spec.resources, nodes, cluster, deadline)
        extensions = spec.config.extensions.model_copy(update={"path": folders})
        config = spec.config.model_copy(update={"extensions": extensions})
        self.spec = replace(spec, config=config, log_mark=mark(spec.log_dir))
        self.logs = LogCollector()

    def options(self, index: int) -> dict[str, Any]:
        """Options of a Ray actor that place it in bundle number `index`."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def close(self) -> None:
        """Copy the rest of the logs, and remove the placement group."""
        self.logs.close()
        unmark(self.spec.log_dir)
        remove_placement_group(self._group)


def _reserve(
    count: int, resources: Mapping[str, int], nodes: Sequence[Node], cluster: ClusterConfig, deadline: float
) -> PlacementGroup:
    wanted = f"{count} engines of {described(resources)} each (cluster.engine_placement: {cluster.engine_placement})"
    there = "\n  ".join(str(node) for node in nodes)
    if sum(node.holds(resources) for node in nodes) < count:
        raise ClusterError(f"no place for {wanted}; the cluster has\n  {there}")
    bundle = {name: float(amount) for name, amount in resources.items() if amount}
    group: PlacementGroup = placement_group([bundle] * count, strategy=_STRATEGIES[cluster.engine_placement])
    if not group.wait(max(0.0, deadline - time.monotonic())):
        remove_placement_group(group)
        free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        unused = described({name: free.get(name, 0) for name in resources})
        raise ClusterError(
            f"no place became free for {wanted}; unused of all nodes: {unused}; the cluster has\n  {there}"
        )
    return group
