"""Sleep and wake of engines that share GPUs with the trainer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.base.stop import Stop, stop_poll
from ctpo_megatron.engines.handle import EngineHandle, engine_died
from ctpo_megatron.engines.tasks import EngineError

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's tags of what an engine holds in GPU memory."""


class SleepState:
    """Puts all engines of a pool to sleep and wakes them; engines that died meanwhile are in `dead`, and are skipped.

    asleep: the tags that are asleep. dead: cleared by the caller when it restarts them. A restart needs GPU memory, so
    it waits until the trainer has released the GPU.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.asleep: tuple[str, ...] = ()
        self.dead: list[EngineHandle] = []

    def sleep(self, engines: Sequence[EngineHandle], level: int, stop: Stop, timeout_s: float | None = None) -> None:
        """Level 1 keeps the weights in host memory, 2 keeps nothing. Idempotent; raises EngineError, Cancelled."""
        if not self.asleep:
            references = [(engine, engine.begin_sleep(level)) for engine in engines]
            self._wait_for(references, "fall asleep", stop, self._timeout_s if timeout_s is None else timeout_s)
            self.asleep = (WEIGHTS, CACHE)

    def wake(self, engines: Sequence[EngineHandle], stop: Stop, *what: str) -> None:
        """Wake the tags in `what` that are asleep, weights first. Raises EngineError, Cancelled."""
        tags = [tag for tag in self.asleep if tag in what]
        if tags:
            references = [(engine, engine.begin_wake(tags)) for engine in self.living(engines)]
            self._wait_for(references, f"wake its {' and '.join(tags)}", stop, self._timeout_s)
            self.asleep = tuple(tag for tag in self.asleep if tag not in tags)

    def living(self, engines: Sequence[EngineHandle]) -> list[EngineHandle]:
        """The engines that are not in `dead`."""
        return [engine for engine in engines if engine not in self.dead]

    def _wait_for(
        self, references: Sequence[tuple[EngineHandle, Any]], what: str, stop: Stop, timeout_s: float
    ) -> None:
        deadline = time.monotonic() + timeout_s
        for engine, reference in references:
            while not ray.wait([reference], timeout=0)[0]:
                if not (pause_s := stop_poll(deadline, stop, f"{engine.name} to {what}")):
                    raise EngineError(f"{engine.name} did not {what} within {timeout_s:g} s; log: {engine.log_path}")
                ray.wait([reference], timeout=pause_s)
            try:
                ray.get(reference)
            except RayError as error:
                if not engine_died(error):
                    raise EngineError(f"{engine.name} did not {what}: {error}; log: {engine.log_path}") from error
                self.dead.append(engine)  # no failure of the run: it is restarted later
