"""The stand-ins for an `EnginePool` and for Ray around simulated engines, and faults that happen to them."""

from __future__ import annotations

import io
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from benchmarks.simulated_engines import Engine, Reference, Speed, Workload
from benchmarks.simulated_time import Clock
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines import GroupOutcome, pool_stats


class Pool:
    """The stand-in for an `EnginePool`: its lock, its engines and its accounts."""

    def __init__(self, settings: RolloutConfig, clock: Clock, speed: Speed, workload: Workload, count: int) -> None:
        self.settings, self.lock, self._clock, self._speed = settings, clock.lock(), clock, speed
        seats = settings.engine.max_num_seqs
        self.engines = [Engine(index, clock, speed, seats, workload) for index in range(count)]
        self.load: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.occupancy = SimpleNamespace(add=lambda engine, trajectories: None)
        self.is_asleep = False

    def check_prompt(self, prompt: Prompt) -> None:
        """All fit."""

    def check_start(self) -> None:
        """All have started."""

    def wait_ready(self) -> SimpleNamespace:
        """What `Controller` has to know of them."""
        return SimpleNamespace(dtype="bfloat16", transport="simulated")

    def send(self, trainer: Any, version: int) -> None:
        """Give all engines new weights, as over `nccl`: those that were replaced come up first."""
        for engine in self.engines:
            if engine.dead:
                self.restart(engine)
        for engine in self.engines:
            self._clock.wait(math.inf, lambda engine=engine: not engine.starting or engine.ready_ref.done)
        with self._clock.free():
            for engine in self.engines:
                engine.take_weights(version)
                engine.admit()
        self._clock.sleep(self._speed.update_s)

    def finish_update(self) -> bool:
        """Nothing is pending after `send`."""
        return True

    def sleep(self, level: int) -> None:
        """Leave the GPUs to the trainer."""
        self.is_asleep = True
        self._clock.sleep(self._speed.sleep_s)

    def wake(self) -> None:
        """Take the GPUs again."""
        self.is_asleep = False
        self._clock.sleep(self._speed.sleep_s)

    def register_started(self) -> None:
        """Engines whose new process is up wait for the next weights."""
        for engine in self.engines:
            if engine.starting and engine.ready_ref.done:
                engine.park()

    def restart(self, engine: Engine) -> None:
        """Begin a new process for an engine that died."""
        self.counts["engine_restarts"] += 1
        engine.kill()
        engine.launch()

    def note_occupancy(self) -> None:
        """Not recorded."""

    def stats(self) -> dict[str, float]:
        """Counts since the last call."""
        stats = pool_stats(self.counts)
        self.counts.clear()
        return stats


class Ray:
    """What the scheduler uses of Ray, in simulated time. get_s: Ray's own CPU time for the answer of a group."""

    def __init__(self, clock: Clock, pool: Pool, workload: Workload, get_s: float) -> None:
        self._clock, self._workload, self._get_s = clock, workload, get_s
        self._engines = pool.engines
        self.last_done = 0.0

    def wait(
        self, references: Collection[Reference], num_returns: int = 1, timeout: float = math.inf
    ) -> tuple[list[Reference], list[Reference]]:
        if timeout > 0:
            until = self._clock.monotonic() + timeout
            self._clock.wait(until, lambda: any(reference.done for reference in references))
        ready = [reference for reference in references if reference.done]
        return ready[:num_returns], ready[num_returns:]

    def get(self, reference: Reference, timeout: float) -> GroupOutcome:
        """Unpickles a group as Ray does, with buffers out of band."""
        if reference.error is not None:
            raise reference.error
        self.last_done = max(self.last_done, reference.done_at)
        with self._clock.free():
            buffers: list[pickle.PickleBuffer] = []
            sink = io.BytesIO()
            group = [self._workload.trajectory(episode) for episode in reference.episodes]
            pickle.Pickler(sink, protocol=5, buffer_callback=buffers.append).dump(GroupOutcome(group))
            answer, blobs = sink.getvalue(), [bytes(buffer.raw()) for buffer in buffers]
            reference.episodes.clear()
        self._clock.sleep(self._get_s)
        outcome: GroupOutcome = pickle.loads(answer, buffers=blobs)
        return outcome

    def cancel(self, reference: Reference, force: bool) -> None:
        for engine in self._engines:
            engine.cancel(reference)


def faults(clock: Clock, pool: Pool, every_s: float, seed: int = 0) -> Callable[[], None]:
    """Let an engine die after every `every_s` seconds on average; call the result once to begin."""
    rng = random.Random(seed)

    def strike() -> None:
        if serving := [engine for engine in pool.engines if engine.responds()]:
            rng.choice(serving).die()
        plan()

    def plan() -> None:
        clock.at(clock.now + rng.expovariate(1.0 / every_s), strike)

    return plan
