"""Publish, wake, sample and train on pretended GPUs, over vLLM's own producer, consumer and layerwise reload.

Rank zero's GPU is looked at, which holds most. Real are the trainer on all ranks, the order of `Run`, the
transports, and what vLLM does at both ends. An engine's cache is a number of bytes, and nothing is sampled.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.config import Config, OptimizerConfig, shares_gpus
from ctpo_megatron.data import Batch
from ctpo_megatron.engines.weights import EngineFacts, SendsWeights, checksums
from ctpo_megatron.policy import destroy_distributed, init_distributed
from ctpo_megatron.run import Run, Services, TrainerGroup
from tests.policy import models
from tests.rehearsal import fused_adam, streams
from tests.rehearsal.allocator import Allocator, Gpu
from tests.rehearsal.engine import Engine, stand_in
from tests.rehearsal.streams import Process, here
from tests.rehearsal.transfer_cases import GPU_MIB, MIB, SAMPLING, SCALE, SENT, UPDATE, TransferCase

STEPS = 1
Peaks = dict[str, dict[str, tuple[int, int]]]
"""Of whose GPU -> moment -> most bytes, without and with gaps in segments; see `Gpu`."""


class Moments:
    """The peak of each GPU in each moment of the steps."""

    def __init__(self, gpus: dict[str, Gpu]) -> None:
        self._gpus, self._now = gpus, ""
        self.peaks: Peaks = {name: {} for name in gpus}

    def enter(self, moment: str) -> None:
        """The former one has ended."""
        for name, gpu in self._gpus.items():
            before = self.peaks[name].get(self._now, (0, 0))
            self.peaks[name][self._now] = max(before[0], gpu.peak), max(before[1], gpu.peak_with_gaps)
            gpu.watch()
        self._now = moment


class Pool:
    """Stands for `EnginePool`, with one engine, of one GPU, in this process."""

    def __init__(self, config: Config, engine: Engine, memory: Allocator, moments: Moments) -> None:
        """memory: of the engine's process."""
        gpu = memory.gpu
        self.settings = config.rollout
        self._engine, self._gpu, self._own, self._moments = engine, gpu, memory, moments
        whole = int(config.rollout.engine.gpu_memory_utilization * GPU_MIB * MIB)
        self._sizes = {"weights": engine.weights, "cache": whole - engine.weights}
        self._asleep = set(self._sizes) if shares_gpus(config) else set()
        memory.empty_cache()
        gpu.take(-memory.reserved)  # of the model, which is counted by `_sizes`
        gpu.take(sum(size for name, size in self._sizes.items() if name not in self._asleep))

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    def wait_ready(self) -> EngineFacts:
        transport: Any = self.settings.weights.transport
        return EngineFacts(torch.bfloat16, "127.0.0.1", transport)

    def sleep(self, level: int) -> None:
        """vLLM empties torch's cache, too."""
        self._own.empty_cache()
        for name in self._sizes.keys() - self._asleep:
            self._gpu.take(-self._sizes[name])
        self._asleep = set(self._sizes)

    def send(self, trainer: SendsWeights, version: int) -> None:
        assert trainer.announce(version) is None
        if not self._asleep:
            torch.cuda.empty_cache()  # as torch does by itself when a GPU of its own has no more
        self._moments.enter(SENT)
        self._wake("weights")
        sums = trainer.send(version)
        assert self._received == [sums]

    @property
    def members(self) -> tuple[object, ...]:
        return (self._engine,)

    def lead(self, method: str, arguments: Any = lambda _: (), abort: Any = None) -> list[str]:
        """In this process, and in the calling thread: not by Ray."""
        self._received = self._engine.call(method, *arguments(0))
        return []

    def wake(self) -> None:
        self._own.empty_cache()  # what is there belongs to its share from now on
        self._moments.enter(SAMPLING)
        self._wake("cache")

    def _wake(self, name: str) -> None:
        if name in self._asleep:
            self._asleep.remove(name)
            self._gpu.take(self._sizes[name])


class Rollouts:
    """Stands for `Rollouts`, which sample nothing, and for an evaluation that is never due."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def publish(self, trainer: SendsWeights, version: int) -> bool:
        self._pool.send(trainer, version)
        return True

    def next_batch(self, step: int) -> Batch:
        return Batch([])

    def end(self) -> None:
        """No evaluation is under way."""


class Report:
    """Stands for `Reporter`."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        """Nothing is shown."""


def rehearse(case: TransferCase, model: Path, folder: Path) -> Peaks | None:
    """One case on this rank; None on other ranks than zero. Raises UnorderedAccess."""
    fused_adam.install("transformer_engine")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    # Constants that do not grow with a model have to be as small as it is.
    checksums._BLOCK["cuda"] //= SCALE
    gpu = Gpu(SCALE)
    here().memory = Allocator(gpu)
    config = case.config(model, folder)
    layout = init_distributed(config.policy, seed=0)
    try:
        with TrainerGroup(config, layout, NeverStop()) as group:  # type: ignore[arg-type]
            stand_in()
            if layout.is_rank_zero:
                return _lead(case, config, group, gpu)
            group.serve()
            return None
    finally:
        destroy_distributed()


def _lead(case: TransferCase, config: Config, group: TrainerGroup, gpu: Gpu) -> Peaks:
    shared = case.transport == "ipc"
    gpu_of_engine = gpu if shared else Gpu(SCALE)
    memory = Allocator(gpu_of_engine)
    engine = Engine(Path(config.model.path), case.transport, Process("engine", 0 if shared else 1, memory))
    moments = Moments({"trainer": gpu} | ({} if shared else {"engine": gpu_of_engine}))
    pool: Any = Pool(config, engine, memory, moments)
    rollouts: Any = Rollouts(pool)
    report: Any = Report()
    nothing: Any = None
    run = Run(config, group, Services(rollouts, rollouts, pool), nothing, report, nothing)
    with ExitStack() as stack:
        stack.callback(group.disconnect)
        group.build()
        group.use_optimizer(OptimizerConfig(lr=1e-3), STEPS)
        run.publish()
        for step in range(STEPS):
            assert run.next_batch(step) is not None
            moments.enter(UPDATE)
            group.fine_tune(8, conversations=models.trajectories(8, seed=step))
            run.publish()
        moments.enter("")
    assert streams.current() is streams.default(), "a transfer has left the trainer on another stream"
    return moments.peaks
