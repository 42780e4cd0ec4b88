"""The scheduler: which group runs on which engine, in which order, retried whole when something breaks under it."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ctpo_megatron.base.printable import printable
from ctpo_megatron.base.redact import hidden
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import (
    EngineError,
    EngineHandle,
    EnginePool,
    GroupFailed,
    GroupOutcome,
    GroupTask,
    engine_died,
)
from ctpo_megatron.engines.weights import OffersWeights
from ctpo_megatron.rollouts.ledger import Quarantine, Quarantined
from ctpo_megatron.rollouts.request import Answers, GroupJob, Request
from ctpo_megatron.rollouts.timeouts import FETCH_TIMEOUT_S, LONGEST_PAUSE_S, PAUSE_S, TICK_S


@dataclass(slots=True)
class _InFlight:
    """A submitted job. launch: number of the engine's process; deadline: monotonic."""

    job: GroupJob
    engine: EngineHandle
    launch: int
    deadline: float
    samples: int


class GroupOrder:
    """Which group begins first: early steps before later ones, and within a step the longest, so that none ends alone.

    Predicts response lengths, in tokens, by the mean of a prompt's last group. Not checkpointed: it is a guess.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sum = 0.0

    def note(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Take in a complete group."""
        if trajectories:
            mean = statistics.fmean(trajectory.response_tokens for trajectory in trajectories)
            self._sum += mean - self._last.get(prompt.id, 0.0)
            self._last[prompt.id] = mean

    def sorted(self, jobs: Iterable[GroupJob]) -> list[GroupJob]:
        """The jobs in the order in which to begin them; equal ones stay in their order."""
        longest = sorted(jobs, key=lambda job: self.expected(job.prompt), reverse=True)
        return sorted(longest, key=lambda job: job.request.step)

    def expected(self, prompt: Prompt) -> tuple[float, int]:
        """Length of the prompt's last responses, or the mean over all prompts without any; then its own length."""
        usual = self._sum / len(self._last) if self._last else 0.0
        return self._last.get(prompt.id, usual), len(prompt.token_ids)


class Scheduler:
    """Samples groups on the engines of a pool: a `Generator`. Several share a pool; each belongs to one thread.

    The pool's lock is held while anything changes, and free while the scheduler waits.
    """

    def __init__(
        self,
        pool: EnginePool,
        order: GroupOrder,
        retries: int,
        quarantine: Quarantine,
        *,
        background: bool = False,
    ) -> None:
        """order, quarantine: shared by all schedulers of a run. background: yield to the other schedulers, and fill
        the engines with what they leave."""
        self._pool, self._order, self._retries, self._quarantine = pool, order, retries, quarantine
        self._background = background
        self.lock, self.on_hold = pool.lock, False
        self._waiting: list[GroupJob] = []
        self._in_flight: dict[Any, _InFlight] = {}
        self._reported: dict[str, set[int]] = {}
        self._ready: Sequence[Any] = ()
        self._asked_at = 0.0

    @classmethod
    def of(cls, pool: EnginePool, *, background: bool = False) -> Self:
        """The first scheduler of a run, with the pool's settings."""
        settings = pool.settings
        quarantine = Quarantine(settings.max_quarantined)
        return cls(pool, GroupOrder(), settings.max_group_retries, quarantine, background=background)

    def another(self) -> Scheduler:
        """One more on the same pool, which shares order and quarantine; others yield to it."""
        return Scheduler(self._pool, self._order, self._retries, self._quarantine)

    @property
    def quarantined(self) -> list[Quarantined]:
        """See `Generator`."""
        return self._quarantine.records

    @property
    def pending(self) -> Mapping[Any, Prompt]:
        """See `Generator`."""
        jobs = [*self._waiting, *(entry.job for entry in self._in_flight.values())]
        return {job.slot: job.prompt for job in jobs}

    @property
    def in_flight(self) -> int:
        """See `Generator`."""
        return len(self._in_flight)

    def stats(self) -> dict[str, float]:
        """See `Generator`."""
        return self._pool.stats()

    def wait_ready(self) -> None:
        """See `Generator`."""
        self._pool.wait_ready()

    def update(self, trainer: OffersWeights, version: int) -> None:
        """See `Generator`."""
        self._pool.send(trainer, version)

    def add(self, slot: Hashable, prompt: Prompt, request: Request) -> None:
        """See `Generator`."""
        if prompt.id in self._quarantine:
            if request.replacements is None:
                return
            prompt = self._quarantine.draw(request.replacements)
        self._pool.check_prompt(prompt)
        occurrence = request.occurrence(prompt) if request.occurrence is not None else 0
        self._waiting.append(GroupJob(slot, prompt, request, occurrence))

    def submit(self) -> None:
        """See `Generator`. The least busy engine comes first, and takes as many groups as fill its batches."""
        if self.on_hold:
            return
        jobs, self._waiting = self._order.sorted(self._waiting), []
        load, now = self._pool.load, time.monotonic()
        taken = load if self._background else Counter(entry.engine.index for entry in self._in_flight.values())
        for job in jobs:
            # One group more than fills its batch: an engine does not idle until the next tick when a group ends.
            capacity = -(-self._pool.settings.engine.max_num_seqs // job.request.samples) + 1
            free = [engine for engine in self._pool.engines if engine.live and taken[engine.index] < capacity]
            if not free or job.not_before > now:
                self._waiting.append(job)
                continue
            engine = min(free, key=lambda engine: load[engine.index])
            load[engine.index] += 1
            if taken is not load:
                taken[engine.index] += 1
            self._submit_to(engine, job, now + self._pool.settings.group_timeout_s)

    def _submit_to(self, engine: EngineHandle, job: GroupJob, deadline: float) -> None:
        request = job.request
        done = {*request.done.get(job.prompt.id, ()), *self._reported.get(job.prompt.id, ())}
        samples = tuple(index for index in range(request.samples) if index not in done)
        task = GroupTask(
            job.prompt, request.step, samples, request.sampling, early=request.early, occurrence=job.occurrence
        )
        self._in_flight[engine.submit(task)] = _InFlight(job, engine, engine.launches, deadline, len(samples))
        self._pool.occupancy.add(engine.index, len(samples))

    def wait(self, timeout_s: float) -> None:
        """See `Generator`."""
        with self.lock:
            self.submit()
            self._pool.note_occupancy()
            watched, timeout = self._watched(), self._patience(timeout_s)
        self._ready = _finished(watched, timeout)  # without the lock: other schedulers and updates continue meanwhile

    def collect(self) -> Answers:
        """See `Generator`."""
        answers, ready, self._ready = Answers(), self._ready, ()
        for reference in ready:
            if reference in self._in_flight:  # the others are starts of engines: `register_started`
                self._complete(reference, answers)
        self._pool.register_started()
        self._expire()
        self._collect_early(answers)
        self._pool.note_occupancy()
        return answers

    def cancel(self) -> None:
        """See `Generator`."""
        with self.lock:
            self.discard(self.pending)
            self._reported.clear()
            for engine in self._pool.engines:
                engine.forget_finished()
            self._pool.note_occupancy()

    def discard(self, slots: Collection[Hashable]) -> None:
        """See `Generator`."""
        for reference, entry in list(self._in_flight.items()):
            if entry.job.slot in slots:
                self._take_back(reference)
                ray.cancel(reference, force=False)
        self._waiting = [job for job in self._waiting if job.slot not in slots]

    def _take_back(self, reference: Any) -> _InFlight:
        entry = self._in_flight.pop(reference)
        self._pool.load[entry.engine.index] -= 1
        self._pool.occupancy.add(entry.engine.index, -entry.samples)
        return entry

    def _watched(self) -> list[Any]:
        engines = self._pool.engines
        if all(engine.parked for engine in engines):
            raise EngineError(
                "all engines died and were replaced, and get weights only with the next update "
                f"(rollout.weights.transport: {self._pool.settings.weights.transport}): restart the run with "
                "run.resume=auto"
            )
        return [*self._in_flight, *(engine.ready_ref for engine in engines if engine.starting)]

    def _patience(self, longest_s: float) -> float:
        """Seconds until something other than a finished call has to be handled."""
        wake = [entry.deadline for entry in self._in_flight.values()]
        wake += [job.not_before for job in self._waiting if job.not_before > 0]
        wake += [engine.deadline for engine in self._pool.engines if engine.starting]
        return min(longest_s, max(0.01, min(wake) - time.monotonic())) if wake else longest_s

    def _complete(self, reference: Any, answers: Answers) -> None:
        """Take in one finished call: a group, or a reason to try it again."""
        entry = self._take_back(reference)
        job, engine = entry.job, entry.engine
        died = f"{engine.name} died; its log: {engine.log_path}"
        # A replaced process may still have finished a group, perhaps with half of its new weights.
        if entry.launch != engine.launches:
            self._retry(job, died)
            return
        try:
            outcome: GroupOutcome = ray.get(reference, timeout=FETCH_TIMEOUT_S)
        except RayError as error:
            self._retry(job, self._cause(engine, error) or died)
            return
        if outcome.trajectories is None:
            self._pool.counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            self._retry(job, outcome.failure, pause=True)
            return
        self._order.note(job.prompt, outcome.trajectories)
        if job.request.early:
            self._report(job.prompt, outcome.trajectories, answers)
            outcome.trajectories.clear()  # all samples of an evaluation may not fit into memory
        answers.groups.append((job.slot, Group(job.prompt, outcome.trajectories)))

    def _cause(self, engine: EngineHandle, error: RayError) -> str:
        """Why a call failed; empty when the engine died, which is restarted then."""
        if not engine_died(error):
            cause = error.cause if isinstance(error, RayTaskError) else error
            what = str(cause) if isinstance(cause, GroupFailed) else repr(cause)
            return f"{what} on {engine.name}; its log: {engine.log_path}"
        if engine.live and isinstance(error, ActorUnavailableError) and engine.responds():
            return f"the connection to {engine.name} broke"
        if engine.live:
            self._pool.restart(engine)
        return ""

    def _collect_early(self, answers: Answers) -> None:
        """Samples that have finished in groups that have not, so that an end at any time costs little."""
        early = {e.job.prompt.id: e.job.prompt for e in self._in_flight.values() if e.job.request.early}
        if not early or time.monotonic() < self._asked_at + TICK_S:
            return
        self._asked_at = time.monotonic()
        for engine in self._pool.engines:
            for trajectory in engine.take_finished():
                if prompt := early.get(trajectory.prompt_id):
                    self._report(prompt, [trajectory], answers)

    def _report(self, prompt: Prompt, trajectories: Sequence[Trajectory], answers: Answers) -> None:
        """Report samples once: a complete group brings all of its samples again."""
        reported = self._reported.setdefault(prompt.id, set())
        new = [trajectory for trajectory in trajectories if trajectory.sample_index not in reported]
        reported.update(trajectory.sample_index for trajectory in new)
        if new:
            answers.samples.append((prompt, new))

    def _retry(self, job: GroupJob, cause: str, *, pause: bool = False) -> None:
        """Queue the whole group again with the same seeds, or quarantine its prompt and queue its replacement."""
        job.failures += 1
        if job.failures > self._retries:
            self._quarantine_prompt(job, f"failed {job.failures} times, the last: {printable(hidden(cause))}")
            return
        self._pool.counts["group_retries"] += 1
        if pause:
            job.not_before = time.monotonic() + min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (job.failures - 1))
        self._waiting.append(job)

    def _quarantine_prompt(self, job: GroupJob, cause: str) -> None:
        if job.prompt.id not in self._quarantine:  # small data may hold a prompt twice in a batch
            self._pool.counts["quarantined"] += 1
            self._quarantine.add(Quarantined(job.prompt.id, job.request.step, cause))
        self.add(job.slot, job.prompt, job.request)

    def _expire(self) -> None:
        """Take back groups past their deadline; an engine that no longer answers is restarted."""
        now = time.monotonic()
        late = [(reference, entry) for reference, entry in self._in_flight.items() if entry.deadline <= now]
        for reference, entry in late:
            self._take_back(reference)
            ray.cancel(reference, force=False)
            limit = self._pool.settings.group_timeout_s
            self._retry(entry.job, f"no result from {entry.engine.name} within {limit:g} s")
        for engine in {entry.engine.index: entry.engine for _, entry in late}.values():
            if engine.live and not engine.responds():
                self._pool.restart(engine)


def _finished(watched: list[Any], timeout: float) -> list[Any]:
    """References that are finished; none when something else has to be handled."""
    if not watched:
        time.sleep(timeout)
        return []
    ready, _ = ray.wait(watched, timeout=timeout)
    if ready:  # take everything that finished meanwhile
        ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
    return ready
