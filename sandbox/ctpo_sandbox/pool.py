"""The slots of a server, the queue in front of them, and the replacement of what is lost."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ctpo_sandbox.channel import WorkerLost
from ctpo_sandbox.libraries import Library, choose
from ctpo_sandbox.processes import LevelRefused, Template, Worker
from ctpo_sandbox.records import Limits, Outcome
from ctpo_sandbox.remove import remove_tree

_ATTEMPTS = 2
_log = logging.getLogger("ctpo_sandbox.pool")


class PoolUnavailable(Exception):
    """A run could not be carried out on a fresh worker either."""


@dataclass(frozen=True)
class Run:
    """A finished run: how the child ended, its decoded output, whether that was cut, and the seconds it queued."""

    outcome: Outcome
    stdout: str
    stderr: str
    truncated: bool
    queue_s: float


class Pool:
    """`slots` places behind one first-come queue; each has a worker of every library tier, forked at its first use."""

    def __init__(self, *, slots: int, limits: Limits, level: str, libraries: Sequence[Library]) -> None:
        self.level, self.limits = level, limits
        self.lost = 0
        """Attempts that ended with the loss of a template or worker."""

        self._libraries = tuple(libraries)
        self._root = Path(tempfile.mkdtemp(prefix="ctpo-sandbox-"))
        self._root.chmod(0o711)  # runs of other users have their directories below
        self.templates = {tier.name: Template(tier, level, limits, self._root) for tier in libraries}
        self._slots = [
            {name: Worker(slot, template, self._root) for name, template in self.templates.items()}
            for slot in range(slots)
        ]
        self._idle: asyncio.Queue[dict[str, Worker]] = asyncio.Queue()
        self.waiting = 0

    @property
    def directory(self) -> str:
        """The server's own directory."""
        return str(self._root)

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def workers(self) -> list[Worker]:
        return [worker for slot in self._slots for worker in slot.values()]

    @property
    def _parts(self) -> list[Worker | Template]:
        return [*self.workers, *self.templates.values()]

    @property
    def restarts(self) -> int:
        """Templates and workers replaced since the start."""
        return sum(max(0, part.starts - 1) for part in self._parts)

    @property
    def idle(self) -> int:
        return self._idle.qsize()

    @property
    def missing(self) -> dict[str, str]:
        """Protections that this machine does not offer at this level, with the reason."""
        return next(iter(self.templates.values())).missing

    async def start(self) -> None:
        """Start every template and a worker of each. Raises LevelRefused, or WorkerLost when one does not come up."""
        started = (worker.ensure_started() for worker in self._slots[0].values())
        problems = [found for found in await asyncio.gather(*started, return_exceptions=True) if found is not None]
        if problems:
            raise problems[0]
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def run(self, code: str, stdin: str, run_timeout_s: float) -> Run:
        """Execute one snippet; the queue has no deadline of its own, the caller's request has.

        Raises PoolUnavailable when two workers in a row were lost over it. Cancelling kills the snippet.
        """
        queued = time.monotonic()
        self.waiting += 1
        try:
            slot = await self._idle.get()
        finally:
            self.waiting -= 1
        queue_s = time.monotonic() - queued
        worker = slot[choose(code, self._libraries)]
        source, given = (text.encode("utf-8", errors="surrogatepass") for text in (code, stdin))
        try:
            found = await self._run_with_retry(worker, source, given, run_timeout_s)
        except asyncio.CancelledError:
            worker.kill()
            raise
        finally:
            self._idle.put_nowait(slot)
        return Run(*found, queue_s)

    async def _run_with_retry(
        self, worker: Worker, code: bytes, stdin: bytes, run_timeout_s: float
    ) -> tuple[Outcome, str, str, bool]:
        reasons = []
        for _ in range(_ATTEMPTS):
            try:
                await worker.ensure_started()
                return await worker.run(code, stdin, run_timeout_s)
            except (WorkerLost, LevelRefused) as error:
                _log.error("replacing %s: %s", worker.name, error)
                self.lost += 1
                reasons.append(str(error))
                worker.kill()
        raise PoolUnavailable("; then ".join(reasons))

    def close(self) -> None:
        """Kill every process and remove every work directory."""
        for part in self._parts:
            part.kill()
        remove_tree(str(self._root))
