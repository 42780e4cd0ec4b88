"""Group-granular scheduling: groups spread over live engines, retried whole when something breaks under them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines.handle import EngineHandle, engine_died
from ctpo_megatron.engines.tasks import Cancelled, Deliver, FleetError, GroupOutcome, GroupTask, Keep, Request
from ctpo_megatron.rollouts.lengths import LengthPredictor
from ctpo_megatron.rollouts.occupancy import Occupancy
from ctpo_megatron.rollouts.quarantine import Quarantine, Quarantined

_MAX_BACKOFF_S = 10.0
_FETCH_TIMEOUT_S = 60.0
"""For a group that is complete to travel here."""
_TURN_S = 1.0
"""Longest wait before it is looked whether the call was cancelled."""


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its place in the answer, how often it failed, and when it may be tried again."""

    place: Hashable
    prompt: Prompt
    request: Request
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _InFlight:
    job: _Job
    engine: EngineHandle
    launch: int
    deadline: float
    samples: int


class Dispatcher:
    """Plays groups in turns. Several may share engines: one thread takes the turns of each.

    lock: held while anything changes, free while a turn waits. load: groups in flight by engine, of all dispatchers.
    lengths: what is expected to take longest is begun first, within a step. occupancy: is told what is in flight.
    patient: others that play on the engines go first, and fill them with what they have. `restart` replaces an engine,
    `readmit` registers those that came back and finishes an update of the weights; `finished` is called when a group is
    complete. Counts go to `counts`: group_retries, quarantined and lost_<status>.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        engines: Sequence[EngineHandle],
        quarantine: Quarantine,
        counts: Counter[str],
        *,
        lock: AbstractContextManager[Any],
        load: Counter[int],
        lengths: LengthPredictor,
        occupancy: Occupancy,
        patient: bool,
        restart: Callable[[EngineHandle], None],
        readmit: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._rollout, self._engines, self._quarantine, self.counts = rollout, engines, quarantine, counts
        self._lock, self._load, self._lengths, self._patient = lock, load, lengths, patient
        self._occupancy = occupancy
        self._restart, self._readmit, self._finished = restart, readmit, finished
        self.on_hold = False
        self._waiting: list[_Job] = []
        self._in_flight: dict[Any, _InFlight] = {}
        self._played: dict[str, set[int]] = {}
        self._looked = 0.0

    def run(
        self,
        prompts: Sequence[Prompt],
        request: Request,
        cancelled: Callable[[], bool],
        enough: int | None = None,
        each: Callable[[Group], None] = lambda _: None,
    ) -> list[Group]:
        """The groups of `prompts`, in their order; see `EnginePool.generate` for what is replaced or left out.

        Raises TooManyQuarantined, FleetError from `readmit`, and Cancelled within a second or so of
        `cancelled()` being true.
        """
        self._played = {prompt_id: set(indices) for prompt_id, indices in request.played.items()}
        done: dict[Hashable, Group] = {}
        enough = len(prompts) if enough is None else enough

        def deliver(place: Hashable, group: Group) -> None:
            if len(done) < enough:
                done[place] = group
                each(group)

        for engine in self._engines:
            engine.forget_finished()
        try:
            for place, prompt in enumerate(prompts):
                self.admit(place, prompt, request)
            while self.playing and len(done) < enough:
                if cancelled():
                    raise Cancelled(f"{len(prompts) - len(done)} of {len(prompts)} groups were not sampled")
                self.turn(deliver)
                if request.keep is not None:
                    self._keep_early(request.keep)
        finally:
            self.cancel()
        self.counts["late_groups"] += max(0, len(prompts) - enough)
        return [done[place] for place in range(len(prompts)) if place in done]

    def admit(self, place: Hashable, prompt: Prompt, request: Request) -> None:
        """Line up `prompt`, or what takes its place if it is quarantined: another prompt, or nothing.

        Raises TooManyQuarantined, and ValueError when the prompt leaves no room to answer.
        """
        if prompt.id in self._quarantine:
            if request.replacement is None:
                return
            prompt = self._quarantine.draw(request.replacement)
        check_prompt(prompt, self._rollout)
        self._waiting.append(_Job(place, prompt, request))

    @property
    def playing(self) -> dict[Any, Prompt]:
        """The prompts that are lined up or in flight, by place."""
        jobs = [*self._waiting, *(entry.job for entry in self._in_flight.values())]
        return {job.place: job.prompt for job in jobs}

    @property
    def in_flight(self) -> int:
        """Groups that engines are playing."""
        return len(self._in_flight)

    def turn(self, deliver: Deliver, longest_s: float | None = None) -> None:
        """Hand out what is lined up, wait for something to happen, at most `longest_s` (None: 1), and see to it.

        deliver: is given complete groups, while the lock is held. Raises FleetError, TooManyQuarantined.
        """
        with self._lock:
            self.dispatch()
            watched, timeout = self._watched(), self._patience(_TURN_S if longest_s is None else longest_s)
        ready = _wait(watched, timeout)
        with self._lock:
            for reference in ready:
                if reference in self._in_flight:
                    self._complete(reference, deliver)
            self._readmit()
            self._expire()
            self._occupancy.note(len(self._engines))

    def cancel(self) -> None:
        """Leave nothing running behind."""
        with self._lock:
            self.give_up(self.playing)
            self._occupancy.note(len(self._engines))

    def give_up(self, places: Collection[Hashable]) -> None:
        """Play the groups of these places no more; by whoever holds the lock."""
        for reference, entry in list(self._in_flight.items()):
            if entry.job.place in places:
                self._land(reference)
                ray.cancel(reference, force=False)
        self._waiting = [job for job in self._waiting if job.place not in places]

    def dispatch(self) -> None:
        """Hand out jobs, those of early steps first and then the longest, to the least busy live engines, as many as
        fill their batches."""
        if self.on_hold:
            return
        longest = sorted(self._waiting, key=lambda job: self._lengths.expected(job.prompt), reverse=True)
        jobs = sorted(longest, key=lambda job: job.request.step)
        self._waiting.clear()
        now = time.monotonic()
        taken = self._load if self._patient else Counter(entry.engine.index for entry in self._in_flight.values())
        for job in jobs:
            request = job.request
            capacity = -(-self._rollout.engine.max_num_seqs // request.samples) + 1
            free = [engine for engine in self._engines if engine.live and taken[engine.index] < capacity]
            if not free or job.not_before > now:
                self._waiting.append(job)
                continue
            engine = min(free, key=lambda engine: self._load[engine.index])
            self._load[engine.index] += 1
            if taken is not self._load:
                taken[engine.index] += 1
            played = self._played.get(job.prompt.id, ())
            samples = tuple(index for index in range(request.samples) if index not in played)
            task = GroupTask(job.prompt, request.step, samples, request.sampling, early=request.keep is not None)
            deadline = now + self._rollout.group_timeout_s
            self._in_flight[engine.submit(task)] = _InFlight(job, engine, engine.launches, deadline, len(samples))
            self._occupancy.add(engine.index, len(samples))

    def _land(self, reference: Any) -> _InFlight:
        entry = self._in_flight.pop(reference)
        self._load[entry.engine.index] -= 1
        self._occupancy.add(entry.engine.index, -entry.samples)
        return entry

    def _watched(self) -> list[Any]:
        starting = [engine.ready_ref for engine in self._engines if not engine.live and not engine.parked]
        if all(engine.parked for engine in self._engines):
            raise FleetError(
                "all engines died and were replaced, and get weights only with the next update "
                f"(rollout.weights.transport: {self._rollout.weights.transport}): restart the run with run.resume=auto"
            )
        return [*self._in_flight, *starting]

    def _patience(self, longest_s: float) -> float:
        """Seconds until something else than a finished call wants attention."""
        wake = [entry.deadline for entry in self._in_flight.values()]
        wake += [job.not_before for job in self._waiting if job.not_before > 0]
        wake += [engine.deadline for engine in self._engines if not engine.live and not engine.parked]
        return min(longest_s, max(0.01, min(wake) - time.monotonic())) if wake else longest_s

    def _complete(self, reference: Any, deliver: Deliver) -> None:
        """Take in one finished call: a group, or a reason to try it again."""
        entry = self._land(reference)
        job, engine = entry.job, entry.engine
        died = f"{engine.name} died; its log: {engine.log_path}"
        if entry.launch != engine.launches:  # and what it may still have finished, perhaps with half its new weights
            self._retry(job, died)
            return
        try:
            outcome: GroupOutcome = ray.get(reference, timeout=_FETCH_TIMEOUT_S)
        except RayError as error:
            if not engine_died(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                self._retry(job, f"{cause!r} on {engine.name}; its log: {engine.log_path}")
                return
            if engine.live and isinstance(error, ActorUnavailableError) and engine.responds():
                died = f"the connection to {engine.name} broke"
            elif engine.live:
                self._restart(engine)
            self._retry(job, died)
            return
        if outcome.trajectories is None:
            self.counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            self._retry(job, outcome.failure, pause=True)
            return
        self._lengths.note(job.prompt, outcome.trajectories)
        if job.request.keep is not None:
            self._hand_over(job.prompt, outcome.trajectories, job.request.keep)
            outcome.trajectories.clear()  # they may be more than fits into memory
        deliver(job.place, Group(job.prompt, outcome.trajectories))
        self._finished()

    def _keep_early(self, keep: Keep) -> None:
        """Hand over what has finished of groups that have not, so that an end at any time costs little."""
        if time.monotonic() < self._looked + _TURN_S:
            return
        self._looked = time.monotonic()
        playing = {entry.job.prompt.id: entry.job.prompt for entry in self._in_flight.values()}
        for engine in self._engines:
            for trajectory in engine.take_finished():
                if prompt := playing.get(trajectory.prompt_id):
                    self._hand_over(prompt, [trajectory], keep)

    def _hand_over(self, prompt: Prompt, trajectories: Sequence[Trajectory], keep: Keep) -> None:
        """Give those to `keep` that it has not had: a complete group brings all again."""
        played = self._played.setdefault(prompt.id, set())
        new = [trajectory for trajectory in trajectories if trajectory.sample_index not in played]
        played |= {trajectory.sample_index for trajectory in new}
        if new:
            keep(prompt, new)

    def _retry(self, job: _Job, cause: str, *, pause: bool = False) -> None:
        """Queue the whole group again with the same seeds, or quarantine its prompt and queue what replaces it."""
        job.failures += 1
        if job.failures > self._rollout.max_group_retries:
            self._give_up(job, f"failed {job.failures} times, the last: {cause}")
            return
        self.counts["group_retries"] += 1
        if pause:
            job.not_before = time.monotonic() + min(_MAX_BACKOFF_S, 0.5 * 2 ** (job.failures - 1))
        self._waiting.append(job)

    def _give_up(self, job: _Job, cause: str) -> None:
        if job.prompt.id not in self._quarantine:  # small data may hold a prompt twice in a batch
            self.counts["quarantined"] += 1
            self._quarantine.add(Quarantined(job.prompt.id, job.request.step, cause))
        self.admit(job.place, job.prompt, job.request)

    def _expire(self) -> None:
        """Take back groups past their deadline; an engine that no longer answers is restarted."""
        now = time.monotonic()
        late = [(reference, entry) for reference, entry in self._in_flight.items() if entry.deadline <= now]
        for reference, entry in late:
            self._land(reference)
            ray.cancel(reference, force=False)
            limit = self._rollout.group_timeout_s
            self._retry(entry.job, f"no result from {entry.engine.name} within {limit:g} s")
        for engine in {entry.engine.index: entry.engine for _, entry in late}.values():
            if engine.live and not engine.responds():
                self._restart(engine)


def _wait(watched: list[Any], timeout: float) -> list[Any]:
    """Those references that are finished; none when something else wants attention."""
    if not watched:
        time.sleep(timeout)
        return []
    ready, _ = ray.wait(watched, timeout=timeout)
    if ready:  # whatever else finished meanwhile comes along
        ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
    return ready


def check_prompt(prompt: Prompt, rollout: RolloutConfig) -> None:
    """Raises ValueError when `prompt` leaves the model no room to answer."""
    limit = rollout.engine.max_model_len
    if not 0 < len(prompt.token_ids) < limit:
        raise ValueError(
            f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
            f"rollout.engine.max_model_len = {limit}"
        )
