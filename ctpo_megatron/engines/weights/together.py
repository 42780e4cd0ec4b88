"""How receivers of one node share the work: who fetches which bucket, and who takes over when one dies or stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future

from ctpo_megatron.engines.timeouts import NEIGHBOUR_POLL_S
from ctpo_megatron.engines.weights.node_memory import NodeMemory


class SharedWork:
    """Threads of this process fetch what no neighbour fetches, while another uses the buckets in its order."""

    def __init__(self, memory: NodeMemory, order: Sequence[int], patience_s: float) -> None:
        """patience_s: after which a bucket that a neighbour has begun to fetch is fetched here as well."""
        self._memory, self._order, self._patience_s = memory, order, patience_s
        self._changed = threading.Condition()
        self._fetching: set[int] = set()
        self._overdue: set[int] = set()
        self._over = False

    def complete(self, pool: Executor, fetches: Sequence[Callable[[int], None]]) -> Iterator[int]:
        """Numbers of all buckets, each once it is complete. Raises what one of `fetches` raises, each of which fetches
        a bucket and writes it to the memory, in a thread of its own."""
        threads = [pool.submit(self._fetch_all, fetch) for fetch in fetches]
        try:
            for number in self._order:
                self._wait_for(number, threads)
                yield number
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _wait_for(self, number: int, threads: Sequence[Future[None]]) -> None:
        overdue_at = time.monotonic() + self._patience_s
        with self._changed:
            while not self._memory.is_complete(number):
                for thread in threads:
                    if thread.done():
                        thread.result()
                if time.monotonic() > overdue_at:
                    self._overdue.add(number)
                self._changed.wait(NEIGHBOUR_POLL_S)

    def _fetch_all(self, fetch: Callable[[int], None]) -> None:
        while (number := self._next()) is not None:
            try:
                fetch(number)
            finally:
                with self._changed:
                    self._fetching.discard(number)
                    self._memory.release(number)
                    self._changed.notify_all()

    def _next(self) -> int | None:
        """The next bucket that is to be fetched here; None when all are complete, or not needed any more."""
        with self._changed:
            while not self._over:
                missing = [number for number in self._order if not self._memory.is_complete(number)]
                if not missing:
                    return None
                for number in missing:
                    if number not in self._fetching and self._is_ours(number):
                        self._fetching.add(number)
                        return number
                self._changed.wait(NEIGHBOUR_POLL_S)
        return None

    def _is_ours(self, number: int) -> bool:
        if number in self._overdue:
            return True
        if not self._memory.claim(number):
            return False
        if self._memory.is_complete(number):  # since it was listed as missing
            self._memory.release(number)
            return False
        return True
