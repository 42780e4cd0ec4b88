"""Group-granular scheduling: groups spread over live engines, retried whole when something breaks under them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.records import Group, Prompt, Trajectory
from ctpo_megatron.rollout.handle import EngineHandle, engine_died
from ctpo_megatron.rollout.quarantine import Quarantine, Quarantined
from ctpo_megatron.rollout.tasks import Cancelled, FleetError, GroupOutcome, GroupTask, Sampling

_MAX_BACKOFF_S = 10.0
_TURN_S = 1.0
"""Longest wait before it is looked whether the call was cancelled."""


Keep = Callable[[Prompt, Sequence[Trajectory]], None]
"""Takes samples of a prompt as they finish."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `RolloutFleet.generate` was asked for, the prompts apart."""

    step: int
    samples: int
    sampling: Sampling
    cancelled: Callable[[], bool]
    replacement: Callable[[], Prompt] | None
    keep: Keep | None = None
    played: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Job:
    """One prompt on its way: its place in the answer, how often it failed, and when it may be tried again."""

    index: int
    prompt: Prompt
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class _InFlight:
    job: _Job
    engine: EngineHandle
    deadline: float


class Dispatcher:
    """One `generate` call. `restart` replaces an engine, `readmit` registers those that came back; `finished` is called
    when a group is complete.

    Counts go to `counts`: group_retries, quarantined and lost_<status>.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        engines: Sequence[EngineHandle],
        quarantine: Quarantine,
        counts: Counter[str],
        *,
        restart: Callable[[EngineHandle], None],
        readmit: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self._rollout, self._engines, self._quarantine, self._counts = rollout, engines, quarantine, counts
        self._restart, self._readmit, self._finished = restart, readmit, finished
        self._waiting: deque[_Job] = deque()
        self._in_flight: dict[Any, _InFlight] = {}
        self._done: dict[int, Group] = {}
        self._played: dict[str, set[int]] = {}
        self._looked = 0.0

    def run(self, prompts: Sequence[Prompt], request: Request) -> list[Group]:
        """The groups of `prompts`, in their order; see `RolloutFleet.generate` for what is replaced or left out.

        Raises TooManyQuarantined, FleetError from `readmit`, and Cancelled within a second or so of
        `request.cancelled()` being true.
        """
        self._request = request
        self._played = {prompt_id: set(indices) for prompt_id, indices in request.played.items()}
        for engine in self._engines:
            engine.forget_finished()
        try:
            for index, prompt in enumerate(prompts):
                self._queue(index, prompt)
            while self._waiting or self._in_flight:
                if request.cancelled():
                    raise Cancelled(f"{len(prompts) - len(self._done)} of {len(prompts)} groups were not sampled")
                self._dispatch()
                for reference in self._wait():
                    self._complete(reference)
                if request.keep is not None:
                    self._keep_early()
                self._readmit()
                self._expire()
        finally:
            for reference in self._in_flight:  # only on an error: leave nothing running behind
                ray.cancel(reference, force=False)
        return [self._done[index] for index in sorted(self._done)]

    def _queue(self, index: int, prompt: Prompt) -> None:
        """Line up `prompt`, or what takes its place if it is quarantined: another prompt, or nothing."""
        if prompt.id in self._quarantine:
            if self._request.replacement is None:
                return
            prompt = self._quarantine.draw(self._request.replacement)
        check_prompt(prompt, self._rollout)
        self._waiting.append(_Job(index, prompt))

    def _dispatch(self) -> None:
        """Hand out jobs to the least busy live engines, each kept just busy enough to fill its batch."""
        request = self._request
        load = Counter(entry.engine.index for entry in self._in_flight.values())
        capacity = -(-self._rollout.engine.max_num_seqs // request.samples) + 1
        now = time.monotonic()
        for _ in range(len(self._waiting)):
            job = self._waiting.popleft()
            free = [engine for engine in self._engines if engine.live and load[engine.index] < capacity]
            if not free or job.not_before > now:
                self._waiting.append(job)
                continue
            engine = min(free, key=lambda engine: load[engine.index])
            load[engine.index] += 1
            played = self._played.get(job.prompt.id, ())
            samples = tuple(index for index in range(request.samples) if index not in played)
            task = GroupTask(job.prompt, request.step, samples, request.sampling, early=request.keep is not None)
            self._in_flight[engine.submit(task)] = _InFlight(job, engine, now + self._rollout.group_timeout_s)

    def _wait(self) -> list[Any]:
        """References of finished groups; returns empty-handed when something else wants attention."""
        starting = [engine for engine in self._engines if not engine.live and not engine.parked]
        if all(engine.parked for engine in self._engines):
            raise FleetError(
                "all engines died and were replaced, and get weights only with the next update "
                f"(rollout.weights.transport: {self._rollout.weights.transport}): restart the run with run.resume=auto"
            )
        wake = [entry.deadline for entry in self._in_flight.values()]
        wake += [job.not_before for job in self._waiting if job.not_before > 0]
        wake += [engine.deadline for engine in starting]
        timeout = min(_TURN_S, max(0.01, min(wake) - time.monotonic())) if wake else _TURN_S
        watched = [*self._in_flight, *(engine.ready_ref for engine in starting)]
        if not watched:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(watched, timeout=timeout)
        if ready:  # whatever else finished meanwhile comes along
            ready, _ = ray.wait(watched, num_returns=len(watched), timeout=0)
        return [reference for reference in ready if reference in self._in_flight]

    def _complete(self, reference: Any) -> None:
        """Take in one finished call: a group, or a reason to try it again."""
        entry = self._in_flight.pop(reference)
        job, engine = entry.job, entry.engine
        try:
            outcome: GroupOutcome = ray.get(reference)
        except RayError as error:
            if not engine_died(error):
                cause = error.cause if isinstance(error, RayTaskError) else error
                self._retry(job, f"{cause!r} on {engine.name}; its log: {engine.log_path}")
                return
            cause = f"{engine.name} died; its log: {engine.log_path}"
            if engine.live and isinstance(error, ActorUnavailableError) and engine.responds():
                cause = f"the connection to {engine.name} broke"
            elif engine.live:
                self._restart(engine)
            self._retry(job, cause)
            return
        if outcome.trajectories is None:
            self._counts.update(f"lost_{call.status}" for call in outcome.tool_calls)
            self._retry(job, outcome.failure, pause=True)
            return
        if self._request.keep is not None:
            self._hand_over(job.prompt, outcome.trajectories)
            outcome.trajectories.clear()  # they may be more than fits into memory
        self._done[job.index] = Group(job.prompt, outcome.trajectories)
        self._finished()

    def _keep_early(self) -> None:
        """Hand over what has finished of groups that have not, so that an end at any time costs little."""
        if time.monotonic() < self._looked + _TURN_S:
            return
        self._looked = time.monotonic()
        playing = {entry.job.prompt.id: entry.job.prompt for entry in self._in_flight.values()}
        for engine in self._engines:
            for trajectory in engine.take_finished():
                if prompt := playing.get(trajectory.prompt_id):
                    self._hand_over(prompt, [trajectory])

    def _hand_over(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """Give those to `keep` that it has not had: a complete group brings all again."""
        assert self._request.keep is not None
        played = self._played.setdefault(prompt.id, set())
        new = [trajectory for trajectory in trajectories if trajectory.sample_index not in played]
        played |= {trajectory.sample_index for trajectory in new}
        if new:
            self._request.keep(prompt, new)

    def _retry(self, job: _Job, cause: str, *, pause: bool = False) -> None:
        """Queue the whole group again with the same seeds, or quarantine its prompt and queue what replaces it."""
        job.failures += 1
        if job.failures > self._rollout.max_group_retries:
            self._give_up(job, f"failed {job.failures} times, the last: {cause}")
            return
        self._counts["group_retries"] += 1
        if pause:
            job.not_before = time.monotonic() + min(_MAX_BACKOFF_S, 0.5 * 2 ** (job.failures - 1))
        self._waiting.append(job)

    def _give_up(self, job: _Job, cause: str) -> None:
        if job.prompt.id not in self._quarantine:  # small data may hold a prompt twice in a batch
            self._counts["quarantined"] += 1
            self._quarantine.add(Quarantined(job.prompt.id, self._request.step, cause))
        self._queue(job.index, job.prompt)

    def _expire(self) -> None:
        """Take back groups past their deadline; an engine that no longer answers is restarted."""
        now = time.monotonic()
        late = [(reference, entry) for reference, entry in self._in_flight.items() if entry.deadline <= now]
        for reference, entry in late:
            del self._in_flight[reference]
            ray.cancel(reference, force=False)
            limit = self._rollout.group_timeout_s
            self._retry(entry.job, f"no result from {entry.engine.name} within {limit:g} s")
        for engine in {entry.engine.index: entry.engine for _, entry in late}.values():
            if engine.live and not engine.responds():
                self._restart(engine)


def check_prompt(prompt: Prompt, rollout: RolloutConfig) -> None:
    """Raises ValueError when `prompt` leaves the model no room to answer."""
    limit = rollout.engine.max_model_len
    if not 0 < len(prompt.token_ids) < limit:
        raise ValueError(
            f"prompt {prompt.id!r} has {len(prompt.token_ids)} tokens; it needs at least 1 and fewer than "
            f"rollout.engine.max_model_len = {limit}"
        )
