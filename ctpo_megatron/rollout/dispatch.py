"""Group-granular scheduling: groups spread over live engines, retried whole when something breaks under them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ctpo_megatron.config.schema import RolloutConfig
from ctpo_megatron.data.records import Trajectory
from ctpo_megatron.rollout.handle import EngineHandle, FleetError, engine_died
from ctpo_megatron.rollout.tasks import Cancelled, GroupOutcome, GroupTask

_MAX_BACKOFF_S = 10.0
_TURN_S = 1.0
"""Longest wait before it is looked whether the call was cancelled."""


class GroupFailed(FleetError):
    """A group could not be completed within its retries."""


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its place in the answer, how often it failed, and when it may be tried again."""

    index: int
    task: GroupTask
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _Flight:
    job: _Job
    slot: EngineHandle
    deadline: float


class Dispatcher:
    """One `generate` call. `restart` replaces an engine, `revive` admits those that came back; both keep the fleet's
    books. Counts go to `counts`: group_retries and lost_<status>.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        slots: Sequence[EngineHandle],
        counts: Counter[str],
        restart: Callable[[EngineHandle], None],
        revive: Callable[[], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._rollout, self._slots, self._counts = rollout, slots, counts
        self._restart, self._revive, self._cancelled = restart, revive, cancelled
        self._waiting: deque[_Job] = deque()
        self._flights: dict[Any, _Flight] = {}
        self._done: dict[int, list[Trajectory]] = {}

    def run(self, tasks: Sequence[GroupTask]) -> list[list[Trajectory]]:
        """The trajectories of every task, in the order of `tasks`.

        Raises GroupFailed, FleetError from `revive`, and Cancelled within a second or so of `cancelled()` being true.
        """
        self._waiting.extend(_Job(index, task) for index, task in enumerate(tasks))
        try:
            while len(self._done) < len(tasks):
                if self._cancelled():
                    raise Cancelled(f"{len(tasks) - len(self._done)} of {len(tasks)} groups were not sampled")
                self._dispatch()
                for reference in self._wait():
                    self._land(reference)
                self._revive()
                self._expire()
        finally:
            for reference in self._flights:  # only on an error: leave nothing running behind
                ray.cancel(reference, force=False)
        return [self._done[index] for index in range(len(tasks))]

    def _dispatch(self) -> None:
        """Hand out jobs to the least busy live engines, each kept just busy enough to fill its batch."""
        load = Counter(flight.slot.index for flight in self._flights.values())
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            job = self._waiting.popleft()
            capacity = -(-self._rollout.engine.max_num_seqs // job.task.samples) + 1
            free = [slot for slot in self._slots if slot.live and load[slot.index] < capacity]
            if not free or job.not_before > now:
                self._waiting.append(job)
                continue
            slot = min(free, key=lambda slot: load[slot.index])
            load[slot.index] += 1
            self._flights[slot.submit(job.task)] = _Flight(job, slot, now + self._rollout.group_timeout_s)

    def _wait(self) -> list[Any]:
        """References of finished groups; returns empty-handed when something else wants attention."""
        starting = [slot.ready_ref for slot in self._slots if not slot.live]
        wake = [flight.deadline for flight in self._flights.values()]
        wake += [job.not_before for job in self._waiting if job.not_before > 0]
        wake += [slot.deadline for slot in self._slots if not slot.live]
        timeout = min(_TURN_S, max(0.01, min(wake) - time.monotonic())) if wake else _TURN_S
        watched = [*self._flights, *starting]
        if not watched:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(watched, timeout=timeout)
        if ready:  # whatever else finished meanwhile comes along
            ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
        return [reference for reference in ready if reference in self._flights]

    def _land(self, reference: Any) -> None:
        """Take in one finished call: a group, a reason to try it again, or an error that a retry cannot mend."""
        flight = self._flights.pop(reference)
        try:
            outcome: GroupOutcome = ray.get(reference)
        except RayError as error:
            if not engine_died(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                raise GroupFailed(f"prompt {flight.job.task.prompt_id!r} on {flight.slot.name}: {cause!r}") from error
            if flight.slot.live:
                self._restart(flight.slot)
            self._retry(flight.job, f"{flight.slot.name} died; its log: {flight.slot.log_path}")
            return
        if outcome.trajectories is None:
            self._counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            self._retry(flight.job, outcome.failure, pause=True)
            return
        self._done[flight.job.index] = outcome.trajectories

    def _retry(self, job: _Job, cause: str, *, pause: bool = False) -> None:
        """Queue the whole group again with the same seeds, or give up."""
        job.failures += 1
        if job.failures > self._rollout.max_group_retries:
            raise GroupFailed(f"prompt {job.task.prompt_id!r} failed {job.failures} times; last cause: {cause}")
        self._counts["group_retries"] += 1
        if pause:
            job.not_before = time.monotonic() + min(_MAX_BACKOFF_S, 0.5 * 2 ** (job.failures - 1))
        self._waiting.append(job)

    def _expire(self) -> None:
        """Take back groups past their deadline; an engine that no longer answers is restarted."""
        now = time.monotonic()
        late = [(reference, flight) for reference, flight in self._flights.items() if flight.deadline <= now]
        for reference, flight in late:
            del self._flights[reference]
            ray.cancel(reference, force=False)
            limit = self._rollout.group_timeout_s
            self._retry(flight.job, f"no result from {flight.slot.name} within {limit:g} s")
        for slot in {flight.slot.index: flight.slot for _, flight in late}.values():
            if slot.live and not slot.responds():
                self._restart(slot)
