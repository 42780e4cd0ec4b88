"""The slots of a server, their queue, and the replacement of lost processes."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ctpo_sandbox.errors import LevelRefused, Over, RunFault, WorkerLost
from ctpo_sandbox.inside.libraries import Library, choose
from ctpo_sandbox.isolation.control_groups import MemoryGroup, MemoryGroups
from ctpo_sandbox.isolation.remove import remove_tree
from ctpo_sandbox.isolation.users import UserIds
from ctpo_sandbox.records import USERS_OF_RUNS, ChildOutcome, Limits
from ctpo_sandbox.server.channel import read_output, run_files
from ctpo_sandbox.server.processes import Template, Worker
from ctpo_sandbox.temporary import new_folder
from ctpo_sandbox.timeouts import FORK_ATTEMPTS, FORK_PAUSE_S, HEALTH_RUN_TIMEOUT_S, RUN_ATTEMPTS, START_ATTEMPTS

_MAX_WAITING_CHARS = 256 << 20
_HARMLESS = b"pass"
_log = logging.getLogger("ctpo_sandbox.server.pool")


@dataclass(frozen=True)
class RunResult:
    """A finished run: how the child ended, its decoded output, whether that was cut, and the seconds it queued."""

    outcome: ChildOutcome
    stdout: str
    stderr: str
    truncated: bool
    queue_s: float


def _ended_by_program(times: int, queue_s: float) -> RunResult:
    reason = f"because it ended its worker {times} times, and the worker runs other programs"
    return RunResult(ChildOutcome(False, -signal.SIGKILL, 0.0, 0.0, 0.0, killed_for=reason), "", "", False, queue_s)


@dataclass(eq=False)
class _QueuedRun:
    """A queued or running snippet, and its caller's future, which is cancelled when the caller no longer waits."""

    code: bytes
    stdin: bytes
    run_timeout_s: float
    queue_s: float
    verdict: asyncio.Future[RunResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def abandoned(self) -> bool:
        return self.verdict.cancelled()

    def succeed(self, run: RunResult) -> None:
        if not self.verdict.done():
            self.verdict.set_result(run)

    def fail(self, error: Exception) -> None:
        if not self.verdict.done():
            self.verdict.set_exception(error)


class Pool:
    """`slots` slots behind a first-come-first-served queue; each has a worker of every library tier, forked on first
    use.

    Raises SandboxStartError if the limits need a control group that cannot be created, OSError without enough user ids.
    """

    def __init__(
        self,
        *,
        slots: int,
        limits: Limits,
        level: str,
        libraries: Sequence[Library],
        start_timeout_s: float,
        max_waiting: int,
    ) -> None:
        self.max_waiting = max_waiting
        self.level, self.limits = level, limits
        self.lost = 0
        """Attempts that ended with the loss of a template or worker."""

        self.blamed = 0
        """Programs that ended one worker after another, and were answered `runtime_error` for it."""

        self._memory_groups = MemoryGroups.find() if limits.needs_group else None
        self._groups: list[MemoryGroup] = []
        self._libraries = tuple(libraries)
        # Of each slot, and of a spare worker.
        self._users = UserIds(slots + 1) if os.geteuid() == 0 and level in USERS_OF_RUNS else None
        user_ids = () if self._users is None else self._users.ids
        self.root = new_folder("ctpo-sandbox-")
        """The server's own directory."""

        self.root.chmod(0o711)  # runs of other users have their directories below
        self.templates = {
            tier.name: Template(tier, level, limits, self.root, start_timeout_s, user_ids) for tier in libraries
        }
        self._slots = [
            {name: self._worker(slot, template) for name, template in self.templates.items()} for slot in range(slots)
        ]
        self._idle: asyncio.Queue[dict[str, Worker]] = asyncio.Queue()
        self._tasks: set[asyncio.Future[None]] = set()
        self.waiting = self._waiting_chars = 0

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
    def full(self) -> bool:
        """Whether the queue is full."""
        if self.idle:
            return False
        return self.waiting >= self.max_waiting or self._waiting_chars > _MAX_WAITING_CHARS

    @property
    def missing(self) -> dict[str, str]:
        """Protections that are not available at this level on this machine, with the reason."""
        return next(iter(self.templates.values())).missing

    async def start(self) -> None:
        """Start every template and a worker of each. Raises LevelRefused, or WorkerLost when one does not start."""
        started = (self._first_start(worker) for worker in self._slots[0].values())
        problems = [found for found in await asyncio.gather(*started, return_exceptions=True) if found is not None]
        if problems:
            raise problems[0]
        for slot in self._slots:
            self._idle.put_nowait(slot)

    async def _first_start(self, worker: Worker) -> None:
        for left in reversed(range(START_ATTEMPTS)):
            try:
                return await worker.ensure_started()
            except WorkerLost as error:
                if not left or not error.died:
                    raise
                self._replace(worker, error)

    async def run(self, code: str, stdin: str, run_timeout_s: float) -> RunResult:
        """Execute one snippet; the queue has no deadline of its own, the caller's request has.

        Raises asyncio.QueueFull at once when the queue is full, and RunFault when it failed on a fresh worker, too.
        Cancelling kills the snippet, and does not affect others.
        """
        if self.full:
            raise asyncio.QueueFull(
                f"{self.waiting} requests wait for a slot already (--max-waiting, and 256 MB of code and input)"
            )
        tier, queued, size = choose(code, self._libraries), time.monotonic(), len(code) + len(stdin)
        self.waiting += 1
        self._waiting_chars += size
        try:
            slot = await self._idle.get()
        finally:
            self.waiting -= 1
            self._waiting_chars -= size
        worker = slot[tier]
        source, given = (text.encode("utf-8", errors="surrogatepass") for text in (code, stdin))
        job = _QueuedRun(source, given, run_timeout_s, time.monotonic() - queued)
        self._in_background(self._occupy(slot, worker, job))  # so that a disconnect interrupts none of its steps
        try:
            return await job.verdict
        except asyncio.CancelledError:
            worker.stop()
            raise

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _occupy(self, slot: dict[str, Worker], worker: Worker, job: "_QueuedRun") -> None:
        try:
            await self._run_with_retry(worker, job)
            await self._finish(worker)
        except Exception as error:
            job.fail(error)
        finally:
            job.fail(RunFault("the server ends"))
            self._idle.put_nowait(slot)

    async def _finish(self, worker: Worker) -> None:
        """Wait until the files of its last run are removed, or replace it for taking too long."""
        try:
            await worker.finish()
        except WorkerLost as error:
            self._replace(worker, error)

    async def _run_with_retry(self, worker: Worker, job: "_QueuedRun") -> None:
        """Set the verdict, unless the caller no longer waits for it. Raises RunFault.

        Losing workers is the program's fault when they raised exceptions over it, and each that took the place of one
        ran another program. A kill says nothing about the program.
        """
        reasons: list[str] = []
        over: set[Over] = set()
        lost = healthy = 0
        while not job.abandoned:
            started = False
            try:
                await worker.ensure_started()
                started = True
                if not job.abandoned:
                    await self._run_once(worker, job)
                return
            except (WorkerLost, LevelRefused) as error:
                last: Exception = error
                self._replace(worker, error)
                reasons.append(str(error))
                passes = False
                over.add("worker" if started and isinstance(error, WorkerLost) else "")
                if started and isinstance(error, WorkerLost) and error.raised:
                    lost += 1
                    healthy += await self._is_healthy(worker)
                if lost == healthy == RUN_ATTEMPTS:
                    self.blamed += 1
                    return job.succeed(_ended_by_program(lost, job.queue_s))
            except RunFault as error:
                last = error
                _log.error("%s", error)
                reasons.append(str(error))
                passes = error.passes
                over.add(error.over)
                await self._finish(worker)
            if len(reasons) >= (FORK_ATTEMPTS if passes else RUN_ATTEMPTS):
                raise RunFault("; then ".join(reasons), over=over.pop() if len(over) == 1 else "") from last
            if passes:
                await asyncio.sleep(FORK_PAUSE_S * 2 ** len(reasons))

    async def _run_once(self, worker: Worker, job: "_QueuedRun") -> None:
        limit = self.limits.output_kb * 1000
        with run_files(job.code, job.stdin) as files:
            outcome = await worker.run(files, job.run_timeout_s)
            (stdout, cut), (stderr, also_cut) = (read_output(output, limit) for output in files[2:])
        job.succeed(RunResult(outcome, stdout, stderr, cut or also_cut, job.queue_s))

    async def _is_healthy(self, worker: Worker) -> bool:
        """Whether a new process in its place runs a harmless program."""
        try:
            await worker.ensure_started()
            with run_files(_HARMLESS, b"") as files:
                outcome = await worker.run(files, HEALTH_RUN_TIMEOUT_S)
            await worker.finish()
            return outcome.exit_code == 0
        except (WorkerLost, LevelRefused, RunFault) as error:
            self._replace(worker, error)
            return False

    def _replace(self, worker: Worker, reason: Exception) -> None:
        _log.error("replacing %s: %s", worker.name, reason)
        self.lost += 1
        left = worker.kill()
        self._in_background(asyncio.to_thread(remove_tree, left))

    def spare_worker(self) -> Worker:
        """Return a worker outside the slots, of the first tier; the caller starts and kills it."""
        return self._worker(self.slots, next(iter(self.templates.values())))

    def _worker(self, slot: int, template: Template) -> Worker:
        group = None
        if self._memory_groups is not None:  # files of runs may be in memory
            size_mb = self.limits.memory_mb + self.limits.disk_mb
            group = self._memory_groups.group(f"{slot}-{template.library.name}", size_mb)
            self._groups.append(group)
        return Worker(slot, template, self.root, group)

    def close(self) -> None:
        """Kill every process and remove every work directory."""
        for task in self._tasks:
            task.cancel()
        for part in self._parts:
            part.kill()
        if self._users is not None:
            self._users.close()
        for group in self._groups:
            group.remove()
        remove_tree(str(self.root))
