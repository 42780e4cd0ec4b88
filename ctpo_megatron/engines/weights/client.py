"""The engines of an update as vLLM's trainer side calls them."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.base.stop import Cancelled, stop_poll
from ctpo_megatron.engines.handle import EngineHandle, reason
from ctpo_megatron.engines.tasks import EngineError

if TYPE_CHECKING:
    from ctpo_megatron.engines.updates import PendingUpdate


class WeightClient:
    """The engines of an update, called all at once: vLLM's `VLLMWeightSyncClient`; rank zero's.

    `update_weights` and its neighbours do not raise. An engine that fails or is late takes no part in the rest of the
    update, and is one that the pool replaces. If these methods raised, rank zero would leave a collective in which the
    other ranks wait for it.
    """

    _update: PendingUpdate
    """The current one; there after `begin`."""

    def __init__(self, workers_each: int, timeout_s: float) -> None:
        """workers_each: GPUs of one engine. timeout_s: for a whole update."""
        self._workers_each, self._timeout_s = workers_each, timeout_s
        self._deadline = 0.0

    def begin(self, update: PendingUpdate) -> None:
        """Call the engines of this update from now on. vLLM's transports keep their client for several updates."""
        self._update = update
        self._deadline = time.monotonic() + self._timeout_s

    @property
    def workers(self) -> int:
        """GPUs of all engines."""
        return self._workers_each * len(self._update.engines)

    @property
    def members(self) -> tuple[object, ...]:
        """The engines' processes: changes when an engine is replaced."""
        return tuple(engine.ready_ref for engine in self._update.engines)

    @property
    def failed(self) -> bool:
        """Whether an engine has failed."""
        return bool(self._update.failed)

    @property
    def is_late(self) -> bool:
        """Whether the update's deadline has passed."""
        return time.monotonic() > self._deadline

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tell every engine the first rank of its workers in the group, where there is one. Raises EngineError."""
        first = init_info.get("rank_offset")
        infos = [
            init_info if first is None else init_info | {"rank_offset": first + number * self._workers_each}
            for number in range(len(self._update.engines))
        ]
        self._call("init_weight_transfer", infos)
        if self._update.failed:
            engines = ", ".join(f"{engine.name} (log: {engine.log_path})" for engine in self._update.failed)
            raise EngineError(f"did not join the weight transport: {engines}")

    def start_weight_update(self) -> None:
        """All engines freeze their requests."""
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """All engines take what is announced; returns when they have it."""
        if (handles := update_info.get("ipc_handles")) is not None:
            # Tuples with classes in them, which the engines' own serialization refuses.
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            update_info = {**update_info, "ipc_handles": None, "ipc_handles_pickled": pickled}
        self._call("receive_weights", [update_info] * len(self._update.engines))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """All engines compute with the new weights and report them, under the version of the offer."""
        versions = [self._update.offer.version] * len(self._update.engines)
        for engine, report in self._call("finish_weight_update", versions):
            self._update.take(engine, report)

    def _call(self, method: str, arguments: Sequence[Any] | None = None) -> list[tuple[EngineHandle, Any]]:
        """Call all engines that have not failed, at once; their answers."""
        calls = []  # all are begun before the first is awaited: in a collective they wait for each other
        for number, engine in enumerate(self._update.engines):
            if engine not in self._update.failed:
                own = () if arguments is None else (arguments[number],)
                calls.append((engine, engine.call(method, *own)))
        answers = []
        for engine, reference in calls:
            if self._arrives(method, engine, reference):
                try:
                    answers.append((engine, ray.get(reference)))
                except RayError as error:
                    self._update.fail(engine, f"{method}: {reason(error)}")
        return answers

    def _arrives(self, method: str, engine: EngineHandle, reference: Any) -> bool:
        """Whether the answer comes in time; otherwise the engine has failed."""
        try:
            while not ray.wait([reference], timeout=0)[0]:
                if not (pause_s := stop_poll(self._deadline, self._update.stop, f"{engine.name} in {method}")):
                    limit = f"{self._timeout_s:g} s (rollout.weights.timeout_s)"
                    self._update.fail(engine, f"it is late in {method} after {limit}; log: {engine.log_path}")
                    return False
                ray.wait([reference], timeout=pause_s)
        except Cancelled as cancelled:
            self._update.fail(engine, str(cancelled))
            return False
        return True
