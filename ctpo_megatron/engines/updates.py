"""One weight update of the pool's engines: whom the transport tells what, and what becomes of each engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from ctpo_megatron.base.event_loop import end
from ctpo_megatron.engines.handle import EngineHandle, reason
from ctpo_megatron.engines.tasks import EngineDied, EngineError, UpdateReport
from ctpo_megatron.engines.weights.checksums import Sums, different

log = logging.getLogger(__name__)

CallArguments = Callable[[int], Any]
"""What a call tells engine number n of an update."""


class EngineUpdate:
    """A version that engines take at once, made on their event loop.

    They take it by themselves, as `message` describes. Where there is none the transport leads them, call by call.

    led: whether there is no message. failed: engines that have not taken it, with the number of their process and the
    cause. sums: of what was sent, once that is known.
    """

    def __init__(
        self, version: int, engines: Sequence[EngineHandle], message: dict[str, Any] | None, timeout_s: float
    ) -> None:
        self.version, self.engines = version, engines
        self.failed: dict[EngineHandle, tuple[int, BaseException | str]] = {}
        self.sums: asyncio.Future[Sums] = asyncio.get_running_loop().create_future()
        self._reports: list[tuple[EngineHandle, UpdateReport]] = []
        self._began, self._timeout_s, self.led = time.monotonic(), timeout_s, message is None
        self._calls: dict[EngineHandle, asyncio.Task[None]] = {}
        if message is not None:
            self._call(lambda engine, _: engine.update(message, version))

    def _call(self, ask: Callable[[EngineHandle, int], Coroutine[Any, Any, Any]]) -> None:
        """Begin to ask all engines that have not failed; ask: takes an engine and its number."""
        self._calls = {
            engine: asyncio.create_task(self._answer(engine, partial(ask, engine, number)))
            for number, engine in enumerate(self.engines)
            if engine not in self.failed
        }

    async def _answer(self, engine: EngineHandle, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        launch = engine.launches
        try:
            answer = await ask()
        except (EngineDied, EngineError) as error:
            self._fail(engine, launch, error)
        else:
            if isinstance(answer, UpdateReport) and launch == engine.launches:
                self._reports.append((engine, answer))

    def _fail(self, engine: EngineHandle, launch: int, why: BaseException | str) -> None:
        what = reason(why) if isinstance(why, BaseException) else why  # Ray's errors are pages of traceback
        log.warning("%s did not take weights %d: %s", engine.name, self.version, what)
        self.failed[engine] = launch, why

    async def lead(self, method: str, arguments: CallArguments | None, abort: Callable[[], None] | None) -> list[str]:
        """Call a method of all engines that have not failed; returns who has, with their logs.

        abort: where an engine that fails leaves the others waiting. It is called then, and all of them fail at once.
        """
        deadline, key = self._began + self._timeout_s, "rollout.weights.timeout_s"

        def ask(engine: EngineHandle, number: int) -> Coroutine[Any, Any, Any]:
            own = [] if arguments is None else [arguments(number)]
            return engine.ask(f"take weights {self.version}", self._timeout_s, method, *own, key=key)

        self._call(ask)
        waiting: set[asyncio.Task[None]] = set(self._calls.values())
        while waiting:
            left_s = max(0.0, deadline - time.monotonic())
            done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                late = [engine for engine, call in self._calls.items() if not call.done()]
                await self.give_up(late, f"it is late in {method} after {self._timeout_s:g} s ({key})")
            if abort is not None and self.failed:
                first = next(iter(self.failed)).name
                await self.give_up(self.engines, f"the transfer was aborted, as {first} failed")
                await asyncio.to_thread(abort)
            waiting = {call for call in waiting if not call.done()}
        return [f"{engine.name} (log: {engine.log_path})" for engine in self.failed]

    async def give_up(self, engines: Sequence[EngineHandle], why: str) -> None:
        """Ask these engines nothing more, and have them fail."""
        await end([self._calls[engine] for engine in engines if engine in self._calls])
        for engine in engines:
            if engine not in self.failed:
                self._fail(engine, engine.launches, why)

    async def settled(self) -> Sums:
        """Wait until each engine has taken the version or failed, and all of it was sent; returns the sums."""
        await asyncio.gather(*self._calls.values())
        return await self.sums

    async def close(self) -> None:
        """End what still runs."""
        await end(self._calls.values())
        self.sums.cancel()

    @property
    def seconds(self) -> float:
        """Until the last engine had the weights, when it is over; without what the trainer did meanwhile."""
        if self.led:
            return time.monotonic() - self._began
        return max((report.seconds for _, report in self._reports), default=0.0)

    def compare(self, sent: Sums) -> None:
        """Raises EngineError when an engine reports another version, or has received other tensors than were sent."""
        for engine, report in self._reports:
            if report.version != str(self.version):
                raise EngineError(f"{engine.name} reports weights {report.version!r} after being sent {self.version}")
            for received in report.sums:
                if wrong := different(sent, received):
                    names = f"{len(wrong)} tensors, e.g. {', '.join(wrong[:5])}"
                    raise EngineError(
                        f"{engine.name} received other values than weights {self.version} have in {names}"
                    )
