"""The event loop on which engines are run and groups are sampled, in a thread of its own; how other threads call it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future, wait
from typing import Any, Generic, Self, TypeVar

from ctpo_megatron.base.stop import STOP_POLL_S, Cancelled, NeverStop, Stop

T = TypeVar("T")

JOIN_TIMEOUT_S = 30.0
"""For work that was cancelled to end; it has nothing to wait for then."""

log = logging.getLogger(__name__)


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and return when they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Work(Generic[T]):
    """A coroutine that runs on an `EventLoop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop, self._ended = loop, Future[T]()
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._ended.set_exception(Cancelled("stop requested"))
        elif (error := task.exception()) is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(task.result())

    @property
    def done(self) -> bool:
        """Whether it has ended, however."""
        return self._ended.done()

    def wait(self, stop: Stop, what: str = "") -> T:
        """Return its result, or raise what it raises. Cancels it, and raises Cancelled, when `stop` is set.

        what: is waited for, for the message.
        """
        try:
            while not self._ended.done():
                if stop.is_set():
                    raise Cancelled("stop requested" + (f" while waiting for {what}" if what else ""))
                wait([self._ended], STOP_POLL_S)
        except BaseException:
            self.cancel()
            raise
        return self._ended.result()

    def cancel(self) -> None:
        """Cancel it, and return when it has ended."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        if not wait([self._ended], JOIN_TIMEOUT_S).done:
            log.warning(
                "work on the event loop has not ended %g s after it was cancelled, and is left running", JOIN_TIMEOUT_S
            )


class EventLoop:
    """An asyncio loop in a thread of its own; a context manager that ends it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Work[T]:
        """Run a coroutine on the loop, and return at once."""
        return Work(self._loop, work)

    def call(self, work: Coroutine[Any, Any, T], stop: Stop | None = None, what: str = "") -> T:
        """Run a coroutine on the loop, and wait for it; see `Work.wait`. stop: None: it is not cancelled."""
        return self.begin(work).wait(stop or NeverStop(), what)

    def do(self, function: Callable[[], T]) -> T:
        """Call a function on the loop, between two steps of all coroutines."""

        async def call() -> T:
            return function()

        return self.call(call())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the rollout thread has not ended after %g s, and is left behind", JOIN_TIMEOUT_S)
        else:
            self._loop.close()
