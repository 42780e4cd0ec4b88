"""One weight update of the pool's engines, as rank zero sees it, and as vLLM's trainer side leads it."""

from __future__ import annotations

import base64
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.base.stop import Cancelled, Stop, stop_poll
from ctpo_megatron.engines.handle import EngineHandle, reason
from ctpo_megatron.engines.tasks import EngineError, UpdateReport
from ctpo_megatron.engines.weights import WeightOffer
from ctpo_megatron.engines.weights.file import checkpoint_names

log = logging.getLogger(__name__)


def check_complete(offer: WeightOffer, model_path: str) -> None:
    """Raises EngineError when a tensor of the model is missing: engines would silently keep the old one."""
    missing = checkpoint_names(model_path) - offer.names - {"lm_head.weight"}  # absent when tied
    if missing:
        raise EngineError(f"weights {offer.version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")


@dataclass(frozen=True)
class _Call:
    """An engine that has begun to take the offer. launch: number of its process then. deadline: monotonic seconds."""

    engine: EngineHandle
    launch: int
    reference: Any
    deadline: float


@dataclass(frozen=True)
class UpdateResult:
    """failed: engines that died or are late, and why. unchecked: tensors that cannot be read back from the others.
    seconds: from when the offer began to be made until the last engine had it, without what the trainer did between."""

    failed: dict[EngineHandle, BaseException | str]
    unchecked: list[str]
    seconds: float


class PendingUpdate:
    """An offer that engines take at once.

    Engines take a kept offer by themselves, when `tell` was called. The transport leads the update of any other offer,
    engine by engine, and reports the result of each: `take`, `fail`.
    """

    def __init__(self, offer: WeightOffer, engines: Sequence[EngineHandle], stop: Stop) -> None:
        self.offer, self.engines, self.stop = offer, engines, stop
        self.failed: dict[EngineHandle, BaseException | str] = {}
        self._calls: list[_Call] = []
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        offer.begin(self)
        self._making_s = time.monotonic() - offer.began

    def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]] | None = None) -> None:
        """Have all engines begin to take what `message` describes; own: what it says to each engine alone."""
        for engine, more in zip(self.engines, own or [{}] * len(self.engines), strict=True):
            reference, deadline = engine.begin_update(message | more, self.offer.version)
            self._calls.append(_Call(engine, engine.launches, reference, deadline))

    def take(self, engine: EngineHandle, report: UpdateReport) -> None:
        """The engine has taken the offer, and reports this."""
        self._reports.append((engine, report))

    def fail(self, engine: EngineHandle, why: BaseException | str) -> None:
        """The engine has not taken the offer; it is replaced."""
        what = reason(why) if isinstance(why, BaseException) else why  # Ray's errors are pages of traceback
        log.warning("%s did not take weights %d: %s", engine.name, self.offer.version, what)
        self.failed[engine] = why

    @property
    def is_over(self) -> bool:
        """Whether every engine has answered, or is late."""
        return not self._unanswered(timeout_s=0.0)

    def _unanswered(self, timeout_s: float) -> list[_Call]:
        """Calls that have time left and no answer, within `timeout_s`."""
        now = time.monotonic()
        expected = [call for call in self._calls if call.deadline > now]
        if not expected:
            return []
        references = [call.reference for call in expected]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=timeout_s)
        return [call for call in expected if call.reference not in ready]

    def wait(self) -> None:
        """Return once it is over. Raises Cancelled when the stop signal is set meanwhile."""
        while waiting := self._unanswered(timeout_s=0.0):
            last = max(call.deadline for call in waiting)
            names = ", ".join(call.engine.name for call in waiting)
            self._unanswered(stop_poll(last, self.stop, f"{names} to take weights {self.offer.version}"))

    def finish(self) -> UpdateResult:
        """Compare what the engines have with the offer; to be called when it is over.

        An engine that was replaced meanwhile is given the weights when it is up. Raises EngineError when one keeps
        something else than was offered.
        """
        offer, unchecked, slowest_s = self.offer, list[str](), 0.0
        offer.end()
        for call in self._calls:
            if call.launch != call.engine.launches:  # of a process that is gone: its successor gets the offer at start
                continue
            try:
                self.take(call.engine, call.engine.update_report(call.reference, offer.version))
            except (EngineError, RayError) as error:
                self.fail(call.engine, error)
        for engine, report in self._reports:
            unchecked += engine.check_report(report, offer.version, offer.sums)
            slowest_s = max(slowest_s, report.seconds)
        spent_s = self._making_s + slowest_s if offer.kept else time.monotonic() - offer.began
        return UpdateResult(self.failed, list(dict.fromkeys(unchecked)), spent_s)


class ReadBack:
    """Tensors that engines cannot report back; logged when the set changes."""

    def __init__(self) -> None:
        self.unchecked: list[str] = []

    def note(self, unchecked: list[str]) -> None:
        """Record the names of an update."""
        if unchecked and unchecked != self.unchecked:
            names = f"{len(unchecked)} tensors, e.g. {', '.join(unchecked[:3])}"
            log.warning("weights: cannot be read back from the engines, so not compared: %s", names)
        self.unchecked = unchecked


class WeightClient:
    """The engines of an update as vLLM's trainer side calls them, all at once: its `VLLMWeightSyncClient`; rank zero's.

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
