"""Simulated seconds for the product's own code: its waits take none, its CPU time counts as it is.

Threads of a simulation run one at a time. A thread that waits hands over to the next that may run; when none may, the
clock moves on to the next deadline or event. Code under test gets the clock in place of the modules `time` and
`threading` (`Clock.patched`), and its locks and conditions wait in simulated time, too.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch


@dataclass
class _Waiting:
    until: float
    ready: Callable[[], bool]
    turn: threading.Event = field(default_factory=threading.Event)


class Clock:
    """`now` is the simulated time in seconds. cpu: CPU seconds of the simulated threads, by `stage`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cpu: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stuck: RuntimeError | None = None
        self._thread = threading.local()
        self._enter("")

    def _enter(self, stage: str) -> None:
        self._thread.stage, self._thread.free, self._thread.mark = stage, 0, time.thread_time()

    def charge(self) -> None:
        """Let the clock have moved on by the CPU time that this thread took."""
        spent = time.thread_time() - self._thread.mark
        if not self._thread.free:
            self.now += spent
            self.cpu[self._thread.stage] += spent
        self._thread.mark = time.thread_time()

    def monotonic(self) -> float:
        """See `time.monotonic`."""
        self.charge()
        return self.now

    def sleep(self, seconds: float) -> None:
        """See `time.sleep`."""
        self.wait(self.monotonic() + seconds)

    @contextmanager
    def free(self) -> Iterator[None]:
        """What happens within is work of the simulation, and takes no time."""
        self.charge()
        self._thread.free += 1
        try:
            yield
        finally:
            self._thread.mark = time.thread_time()
            self._thread.free -= 1

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count CPU time of this thread under a name."""
        self.charge()
        before, self._thread.stage = self._thread.stage, name
        try:
            yield
        finally:
            self.charge()
            self._thread.stage = before

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Call `event` when the clock has reached `when`; it may not wait."""
        heapq.heappush(self._events, (when, next(self._numbers), event))

    def wait(self, until: float, ready: Callable[[], bool] = lambda: False) -> None:
        """Return at `until`, or as soon as `ready()`; other threads run meanwhile."""
        self.charge()
        me = _Waiting(until, ready)
        self._waiting.append(me)
        self._hand_over()
        me.turn.wait()
        if self._stuck:
            raise self._stuck
        self._thread.mark = time.thread_time()

    def _hand_over(self) -> None:
        """Give the turn to the first that may run, moving the clock if need be."""
        while True:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for waiting in self._waiting:
                if waiting.until <= self.now or waiting.ready():
                    self._waiting.remove(waiting)
                    waiting.turn.set()
                    return
            if not self._waiting:
                return
            following = [waiting.until for waiting in self._waiting] + [when for when, *_ in self._events[:1]]
            if (earliest := min(following)) == math.inf:
                # To all of them: a thread that raised alone would leave the main one waiting.
                self._stuck = RuntimeError(f"every thread waits for ever at {self.now:.1f} s")
                for waiting in self._waiting:
                    waiting.turn.set()
                return
            self.now = earliest

    @contextmanager
    def patched(self, *modules: ModuleType, **names: Any) -> Iterator[None]:
        """These modules use the clock for `time` and `threading`, and `names` for what they import by those names."""
        with ExitStack() as stack:
            for module in modules:
                for name, value in {"time": self, "threading": self._threading, **names}.items():
                    if hasattr(module, name):
                        stack.enter_context(patch.object(module, name, value))
            yield

    @property
    def _threading(self) -> SimpleNamespace:
        return SimpleNamespace(
            RLock=self.lock,
            Condition=lambda lock: Condition(self, lock),
            Thread=lambda **named: Thread(self, **named),
        )

    def lock(self) -> Lock:
        """See `threading.RLock`."""
        return Lock(self)


class Lock:
    """A re-entrant lock whose owner may wait in simulated time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.owner: int | None = None
        self.count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self.owner not in (None, me):
            until = self._clock.monotonic() + timeout if timeout >= 0 else math.inf
            self._clock.wait(until if blocking else 0.0, lambda: self.owner is None)
            if self.owner is not None:
                return False
        self.owner = me
        self.count += 1
        return True

    def release(self) -> None:
        self.count -= 1
        if not self.count:
            self.owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """A condition of a `Lock`."""

    def __init__(self, clock: Clock, lock: Lock) -> None:
        self._clock, self._lock = clock, lock
        self.acquire, self.release = lock.acquire, lock.release
        self._notified = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        count, seen = self._lock.count, self._notified
        self._lock.count, self._lock.owner = 0, None
        self._clock.wait(until, lambda: self._notified != seen and self._lock.owner is None)
        self._lock.acquire()
        self._lock.count = count

    def notify_all(self) -> None:
        self._notified += 1


class Thread:
    """A thread of the simulation: it begins when the one that starts it waits."""

    def __init__(self, clock: Clock, target: Callable[[], None], name: str, daemon: bool = True) -> None:
        self._clock, self._target, self._name = clock, target, name
        self._real = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._begins = _Waiting(0.0, lambda: True)
        self._over = False

    @property
    def ident(self) -> int | None:
        return self._real.ident

    def start(self) -> None:
        self._clock._waiting.append(self._begins)
        self._real.start()

    def _run(self) -> None:
        self._begins.turn.wait()
        self._clock._enter(self._name)
        try:
            self._target()
        finally:
            self._over = True
            self._clock.charge()
            self._clock._hand_over()

    def is_alive(self) -> bool:
        return self._real.ident is not None and not self._over

    def join(self, timeout: float) -> None:
        self._clock.wait(self._clock.monotonic() + timeout, lambda: self._over)
