"""One engine in a Ray actor under one of vLLM's model runners: does it take weights, are its log-probs the model's?

A tiny model in the run's dtype; the truth is transformers in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour import reference
from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.config import Config
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import EnginePool, GroupTask, Sampling
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Sums
from ctpo_megatron.rollouts import GroupSampler


def main() -> None:
    """Write the figures as JSON to `--out`; raises if the engine does not hold what it was sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.engine", description=__doc__)
    parser.add_argument("--runner", choices=["v1", "v2"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; without one a random model is made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"rollout.engine.model_runner={options.runner}", *options.overrides]
        config = reference.quickstart(Path(folder), options.device, options.model, overrides)
        figures = measure(config, options.device)
    options.out.write_text(json.dumps({"runner": options.runner} | figures) + "\n")


def measure(config: Config, device: str) -> dict[str, float]:
    """Seconds to start, to sync and to sample; and |log-prob difference| (nats) before and after the sync."""
    model, prompts = reference.truth(config), reference.prompts_of(config)
    figures: dict[str, float] = {}
    clock = time.perf_counter()
    with EventLoop() as loop, EnginePool(config, "unused", loop) as pool:  # one turn: no tool is called
        pool.start()
        facts = pool.wait_ready()
        figures["start_s"] = time.perf_counter() - clock
        for version in (0, 1):
            if version:
                clock = time.perf_counter()
                pool.send(_Trainer(reference.move(model), device, facts, config, pool), version)
                pool.finish_update()
                figures["sync_s"] = time.perf_counter() - clock
            clock = time.perf_counter()
            trajectories = loop.call(sampled(GroupSampler(pool, config.rollout), prompts, version))
            seconds = time.perf_counter() - clock
            figures[f"tokens_per_s_{version}"] = reference.sampled_tokens(trajectories) / seconds
            figures |= reference.accuracy(model, trajectories, version)
    return figures


async def sampled(sampler: GroupSampler, prompts: Sequence[Prompt], version: int) -> list[Trajectory]:
    """The trajectories of all prompts, with seeds of a step of this number."""
    samples = tuple(range(reference.SAMPLES))
    tasks = [GroupTask(prompt, version, samples, Sampling()) for prompt in prompts]
    return [trajectory for group in await asyncio.gather(*map(sampler.sample, tasks)) for trajectory in group]


class _Trainer:
    """Sends its weights by the transport of these engines."""

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.Tensor]],
        device: str,
        facts: EngineFacts,
        config: Config,
        pool: EnginePool,
    ) -> None:
        ranks: Any = reference.OneRank(tensors, device, facts.dtype)
        settings = TransportSettings.of(config.rollout.weights)
        self._tensors = ranks.tensors
        self._transport = open_transport(ranks, facts, settings, ranks.manifest(), pool)

    def announce(self, version: int) -> dict[str, Any] | None:
        return self._transport.announce(version)

    def send(self, version: int) -> Sums:
        return self._transport.send(self._tensors.items(), version)


if __name__ == "__main__":
    main()
