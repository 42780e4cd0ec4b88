"""A private Ray on a node with pretended GPUs: which of them its engines are given. Prints them as JSON."""

from __future__ import annotations

import json
import os

import ray

from ctpo_megatron.config import Job, Placement
from ctpo_megatron.rollout.ray_runtime import RayRuntime
from tests.config.test_placement import readme


@ray.remote(num_cpus=0)
class Engine:
    """Asks for GPUs as `EngineHandle` does."""

    def gpus(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


def given(visible: str | None, job: Job, **change: object) -> list[str]:
    """What engines of two GPUs each see, the whole job having `visible`."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    placed, counted = Placement.of(readme(**change), job), []
    runtime = RayRuntime(1, counted.append, placed.engine_devices(visible))
    try:
        runtime.wait(120)
        assert counted == [len(placed.engines)]
        engines = [Engine.options(num_gpus=2).remote() for _ in range(len(placed.engines) // 2)]
        seen: list[str] = sorted(ray.get([engine.gpus.remote() for engine in engines], timeout=120))
    finally:
        runtime.close()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible
    return seen


if __name__ == "__main__":
    pairs = {"rollout": {"engine": {"tensor_parallel_size": 2}}}
    halves = {"placement": {"trainer_gpus": 4, "engine_gpus": 4}}
    print(json.dumps({"apart": given("7,6,5,4,3,2,1,0", Job(4), **pairs)}))
