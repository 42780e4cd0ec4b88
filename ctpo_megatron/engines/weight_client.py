"""The fleet's engines as vLLM's trainer-side weight transports call them: its `VLLMWeightSyncClient`, on rank zero."""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from ctpo_megatron.engines.handle import EngineHandle
from ctpo_megatron.engines.pool import EnginePool
from ctpo_megatron.engines.tasks import FleetError, UpdateReport
from ctpo_megatron.engines.weights import EngineFacts
from ctpo_megatron.engines.weights.checksums import Sums

log = logging.getLogger(__name__)


class WeightClient:
    """See `EngineClient`. An engine that fails takes no part in the rest of the update."""

    def __init__(self, fleet: EnginePool, workers_each: int, timeout_s: float) -> None:
        """workers_each: GPUs of one engine."""
        self._fleet, self._workers_each, self._timeout_s = fleet, workers_each, timeout_s
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        self._failed: list[EngineHandle] = []
        self._version = 0

    def engine_facts(self) -> EngineFacts:
        """See `EngineClient`."""
        return self._fleet.engine_facts()

    @property
    def workers(self) -> int:
        """Of all engines."""
        return self._workers_each * len(self._fleet.engines)

    @property
    def members(self) -> tuple[object, ...]:
        """The engines' processes."""
        return tuple(engine.ready_ref for engine in self._fleet.engines)

    def begin(self, version: int, sums: Callable[[], Sums], failed: Callable[[], None]) -> None:
        """See `EngineClient`."""
        self._version, self._sums, self._on_failure = version, sums, failed
        self._deadline = time.monotonic() + self._timeout_s
        self._reports, self._failed = [], []
        self._fleet.begin_transfer()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every engine is told the first rank of its workers in the group, where there is one."""
        self._deadline, self._failed, self._on_failure = time.monotonic() + self._timeout_s, [], lambda: None
        first = init_info.get("rank_offset")
        arguments = []
        for number in range(len(self._fleet.engines)):
            own = {} if first is None else {"rank_offset": first + number * self._workers_each}
            arguments.append([init_info | own])
        self._all("init_weight_transfer", arguments)
        if self._failed:
            names = ", ".join(engine.name for engine in self._failed)
            raise FleetError(f"{names} did not join the weight transport; logs: {self._failed[0].log_path.parent}")

    def start_weight_update(self) -> None:
        """All engines freeze their requests."""
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All engines take what is announced; returns when they have it."""
        if (handles := update_info.get("ipc_handles")) is not None:  # tuples with classes in them
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self._all("receive_weights", [[update_info]] * len(self._fleet.engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines compute with the new weights and say which they are; the version is that of `begin`."""
        arguments = [[self._version]] * len(self._fleet.engines)
        self._reports = self._all("finish_weight_update", arguments)

    def settle(self, began: float, size: int) -> bool:
        """See `EngineClient`."""
        sums, unchecked = self._sums(), list[str]()
        for engine, report in self._reports:
            unchecked += engine.check_report(report, self._version, sums)
        self._fleet.end_transfer(self._failed, list(dict.fromkeys(unchecked)), began, size)
        return not self._failed

    def _all(self, method: str, arguments: list[list[Any]] | None = None) -> list[tuple[EngineHandle, Any]]:
        """Call all engines that have not failed, at once; their answers."""
        references = [
            (engine, engine.call(method, *([] if arguments is None else arguments[number])))
            for number, engine in enumerate(self._fleet.engines)
            if engine not in self._failed
        ]
        answers = []
        for engine, reference in references:
            try:
                answers.append((engine, ray.get(reference, timeout=max(0.0, self._deadline - time.monotonic()))))
            except GetTimeoutError:
                limit = f"{self._timeout_s:g} s (rollout.weights.timeout_s)"
                self._fail(engine, f"it is late in {method} after {limit}; log: {engine.log_path}")
            except RayError as error:
                self._fail(engine, f"{method}: {error}")
        return answers

    def _fail(self, engine: EngineHandle, why: str) -> None:
        log.warning("%s is replaced, it did not take weights %d: %s", engine.name, self._version, why)
        self._failed.append(engine)
        self._on_failure()
