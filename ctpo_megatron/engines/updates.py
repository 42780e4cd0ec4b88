"""One weight update of the pool's engines: whom a transport tells what, and what becomes of each engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from ctpo_megatron.base.stop import Stop
from ctpo_megatron.engines.handle import EngineHandle, reason
from ctpo_megatron.engines.tasks import EngineDied, EngineError, UpdateReport
from ctpo_megatron.engines.weights import WeightOffer
from ctpo_megatron.engines.weights.checksums import Part, differences

log = logging.getLogger(__name__)


class PendingUpdate:
    """An offer that engines take at once.

    Engines take a kept offer by themselves, from `tell` on. The transport leads the update of any other offer, engine
    by engine, and reports what became of each: `take`, `fail`. failed: engines that died or are late, and why. seconds:
    from when the offer began to be made until the last engine had it, without what the trainer did between.
    """

    def __init__(self, offer: WeightOffer, engines: Sequence[EngineHandle], stop: Stop) -> None:
        self.offer, self.engines, self.stop = offer, engines, stop
        self.failed: dict[EngineHandle, BaseException | str] = {}
        self._calls: list[asyncio.Task[None]] = []
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        offer.begin(self)
        self._making_s = time.monotonic() - offer.began

    def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]] | None = None) -> None:
        """Have all engines begin to take what `message` describes; own: what it says to each engine alone."""
        for engine, more in zip(self.engines, own or [{}] * len(self.engines), strict=True):
            self._calls.append(asyncio.create_task(self._taken(engine, message | more)))

    async def _taken(self, engine: EngineHandle, message: dict[str, Any]) -> None:
        launch = engine.launches
        try:
            report = await engine.update(message, self.offer.version)
        except (EngineDied, EngineError) as error:
            if launch == engine.launches and engine.up:  # otherwise it has been replaced meanwhile
                self.fail(engine, error)
        else:
            if launch == engine.launches:
                self.take(engine, report)

    def take(self, engine: EngineHandle, report: UpdateReport) -> None:
        """The engine has taken the offer, and reports this."""
        self._reports.append((engine, report))

    def fail(self, engine: EngineHandle, why: BaseException | str) -> None:
        """The engine has not taken the offer; it is replaced."""
        what = reason(why) if isinstance(why, BaseException) else why  # Ray's errors are pages of traceback
        log.warning("%s did not take weights %d: %s", engine.name, self.offer.version, what)
        self.failed[engine] = why

    async def answers(self) -> None:
        """Wait until each engine has taken the offer or failed."""
        await asyncio.gather(*self._calls)

    @property
    def seconds(self) -> float:
        """See the class; when it is over."""
        if not self.offer.kept:
            return time.monotonic() - self.offer.began
        return self._making_s + max((report.seconds for _, report in self._reports), default=0.0)

    def compare(self) -> list[str]:
        """Compare what engines report with the offer, when it is over; names of tensors that cannot be read back.

        Raises EngineError when one has another version or other weights.
        """
        version, unchecked = self.offer.version, list[str]()
        for engine, report in self._reports:
            if report.version != str(version):
                raise EngineError(f"{engine.name} reports weights {report.version!r} after being sent {version}")
            wrong, unknown = differences((Part(*part) for part in report.parts), self.offer.sums)
            if wrong:
                names = f"{len(wrong)} tensors, e.g. {', '.join(wrong[:5])}"
                raise EngineError(
                    f"{engine.name} keeps other values than weights {version} have in {names}; so it looks, too, where "
                    "they have become NaN or infinite (see actor/grad_norm of the last steps)"
                )
            unchecked += unknown
        return list(dict.fromkeys(unchecked))
