"""A private Ray for two engines of two GPUs each, on a node with pretended ones; prints what each sees, as JSON.

Of the rank's own variables, too: `[gpus, CUDA_DEVICE_MAX_CONNECTIONS]`.
"""

from __future__ import annotations

import json
import os

import ray

from ctpo_megatron.base.cuda_environment import MAX_CONNECTIONS, order_kernels
from ctpo_megatron.config import Job, Placement
from ctpo_megatron.engines import RayRuntime
from tests.config.test_placement import readme

VISIBLE = "8,9,10,11,12,13,14,15"


@ray.remote(num_cpus=0)
class Engine:
    """Asks for GPUs as `EngineHandle` does."""

    def sees(self) -> tuple[str | None, str | None]:
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get(MAX_CONNECTIONS)


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = VISIBLE
    order_kernels()
    placed = Placement.of(readme(rollout={"engine": {"tensor_parallel_size": 2}}), Job(4))
    runtime = RayRuntime(1, placed.engine_devices(VISIBLE))
    try:
        assert runtime.started.result(120.0) == 4.0
        assert os.environ["CUDA_VISIBLE_DEVICES"] == VISIBLE
        assert MAX_CONNECTIONS in os.environ  # this rank keeps its own
        engines = [Engine.options(num_gpus=2).remote() for _ in range(2)]
        print(json.dumps(ray.get([engine.sees.remote() for engine in engines], timeout=120)))
    finally:
        runtime.close()


if __name__ == "__main__":
    main()
