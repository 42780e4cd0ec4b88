"""One weight update of the pool's engines, as rank zero sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.base.stop import Stop, stop_poll
from ctpo_megatron.engines.handle import EngineHandle
from ctpo_megatron.engines.tasks import EngineLate, UpdateReport, WeightSyncError
from ctpo_megatron.engines.weights import WeightOffer
from ctpo_megatron.engines.weights.file import checkpoint_names

log = logging.getLogger(__name__)


def check_complete(offer: WeightOffer, model_path: str) -> None:
    """Raises WeightSyncError when a tensor of the model is missing: engines would silently keep the old one."""
    missing = checkpoint_names(model_path) - offer.names - {"lm_head.weight"}  # absent when tied
    if missing:
        raise WeightSyncError(f"weights {offer.version} lack {len(missing)} tensors, e.g. {sorted(missing)[:3]}")


@dataclass(frozen=True)
class _Call:
    """An engine that was told to take the offer. launch: number of its process then. deadline: monotonic seconds."""

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
    engine by engine, and says here what became of it: `take`, `fail`.
    """

    def __init__(self, offer: WeightOffer, engines: Sequence[EngineHandle], stop: Stop) -> None:
        self.offer, self.engines, self.stop = offer, engines, stop
        self.failed: dict[EngineHandle, BaseException | str] = {}
        self._calls: list[_Call] = []
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        offer.begin(self)
        self._making_s = time.monotonic() - offer.began

    def tell(self, message: dict[str, Any]) -> None:
        """Have all engines begin to take what `message` describes."""
        version = self.offer.version
        self._calls += [
            _Call(engine, engine.launches, *engine.begin_update(message, version)) for engine in self.engines
        ]

    def take(self, engine: EngineHandle, report: UpdateReport) -> None:
        """The engine has taken the offer, and reports this."""
        self._reports.append((engine, report))

    def fail(self, engine: EngineHandle, why: BaseException | str) -> None:
        """The engine has not taken the offer; it is replaced."""
        log.warning("%s is replaced, it did not take weights %d: %s", engine.name, self.offer.version, why)
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

        An engine that was replaced meanwhile is given the weights when it is up. Raises WeightSyncError when one keeps
        something else than was offered.
        """
        offer, unchecked, slowest_s = self.offer, list[str](), 0.0
        offer.end()
        for call in self._calls:
            if call.launch != call.engine.launches:
                continue
            try:
                self.take(call.engine, call.engine.update_report(call.reference, offer.version))
            except (EngineLate, RayError) as error:
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
