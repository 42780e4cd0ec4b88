"""Engines that share GPUs with the trainer: what of them sleeps, and which did not survive it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.engines.handle import EngineHandle, engine_died
from ctpo_megatron.engines.tasks import FleetError

WEIGHTS, CACHE = "weights", "kv_cache"
"""vLLM's names of what an engine has on its GPU."""


class SleepState:
    """Puts all engines of a fleet to sleep and wakes them; an engine that died meanwhile is in `dead`, and is left out.

    dead: emptied by who restarts them, which needs GPU memory: not before the trainer has left.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.asleep: tuple[str, ...] = ()
        self.dead: list[EngineHandle] = []

    def sleep(self, engines: Sequence[EngineHandle], level: int) -> None:
        """Level 1 keeps the weights in host memory, 2 keeps nothing. Idempotent; raises FleetError."""
        if not self.asleep:
            self._wait_for([(engine, engine.begin_sleep(level)) for engine in engines], "fall asleep")
            self.asleep = (WEIGHTS, CACHE)

    def wake(self, engines: Sequence[EngineHandle], *what: str) -> None:
        """Wake what sleeps of `what`, weights first. Raises FleetError."""
        tags = [tag for tag in self.asleep if tag in what]
        if tags:
            references = [(engine, engine.begin_wake(tags)) for engine in self.living(engines)]
            self._wait_for(references, f"wake its {' and '.join(tags)}")
            self.asleep = tuple(tag for tag in self.asleep if tag not in tags)

    def living(self, engines: Sequence[EngineHandle]) -> list[EngineHandle]:
        """Those that are not in `dead`."""
        return [engine for engine in engines if engine not in self.dead]

    def _wait_for(self, references: Sequence[tuple[EngineHandle, Any]], what: str) -> None:
        for engine, reference in references:
            try:
                ray.get(reference, timeout=self._timeout_s)
            except RayError as error:
                if not engine_died(error):
                    raise FleetError(f"{engine.name} did not {what}: {error}; log: {engine.log_path}") from error
                self.dead.append(engine)
