"""What the configuration asks of every node: Ray for the engines, a sandbox, a time to save."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ctpo_megatron.config import Config, Job, Placement, engine_count, has_cuda_device


@dataclass(frozen=True)
class Needs:
    """Of one node. `cpus`: what Ray may promise to engines; `gpus`: those that it shows them, None on a CPU."""

    ray: bool
    sandbox: bool
    cpus: int
    gpus: str | None

    @classmethod
    def of(cls, config: Config, nodes: int, node_ranks: int) -> Needs:
        """On one node the trainer itself starts both: a private Ray, and a sandbox on a free port."""
        ray = nodes > 1 and config.rollout.replay is None
        python = any(tool.name == "python" for tool in config.rollout.tools)
        placed = Placement.of(config, Job(nodes * node_ranks, node_ranks))
        gpus = placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if has_cuda_device() else None
        # Engines of a lost node may move to another: the CPUs that Ray counts there are no limit.
        cpus = engine_count(config) * (config.rollout.engine.threads if gpus is None else 1)
        return cls(ray, ray and python and config.sandbox.url is None, cpus, gpus)
