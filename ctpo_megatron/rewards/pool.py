"""Scores trajectories in worker processes that are killed when a reward function hangs, as a run trains on them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import operator
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.base.text import hidden, printable
from ctpo_megatron.data.records import MissingCause, NoVerdict
from ctpo_megatron.rewards import worker
from ctpo_megatron.rewards.fork_server import fork_server
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.protocol import COUNTS, Reward
from ctpo_megatron.rewards.worker import Pair, Routes, Scored

if TYPE_CHECKING:
    from ctpo_megatron.config import Extension, RewardConfig
    from ctpo_megatron.data.trajectory import Group, Trajectory

_LONGEST_REASON = 1000
GRACE_S = 1.0  # after the deadline, for a worker to discard what it awaits, before it is killed
START_MARGIN_S = 5.0  # at least, for a worker that was killed to be replaced
START_TIMEOUT_S = 120.0  # for all workers to start and load the reward functions
WORKERS_POLL_S = 1.0  # how often a waiting thread checks that the workers are still there
WORKERS_RETRIES = 3  # how often work is given to new workers because all of them were gone
T = TypeVar("T")

log = logging.getLogger(__name__)


class RewardWorkersLost(RuntimeError):
    """The processes that score do not come up, or die again and again; another machine may let them live."""


class Workers:
    """A pool of pebble's, and when one of its tasks ended last: a worker that is frozen while idle ends none.

    It keeps the others from tasks, and pebble's deadline begins with a task.
    """

    def __init__(self, pool: ProcessPool) -> None:
        self.pool = pool
        self._lock, self._pending, self._moved = threading.Lock(), 0, time.monotonic()
        self.frozen = False

    def schedule(self, function: Callable[..., T], arguments: tuple[Any, ...], limit_s: float) -> ProcessFuture[T]:
        """Raises RuntimeError when the pool is broken. limit_s: after which a worker is killed."""
        future: ProcessFuture[T] = self.pool.schedule(function, args=arguments, timeout=limit_s)
        with self._lock:
            self._moved = self._moved if self._pending else time.monotonic()
            self._pending += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: object) -> None:
        with self._lock:
            self._moved = time.monotonic()
            self._pending -= 1

    def active(self, patience_s: float) -> bool:
        """Return whether results can be expected: one came within this time, or there was nothing to do."""
        with self._lock:
            idle_s = time.monotonic() - self._moved if self._pending else 0.0
        if idle_s > patience_s and not self.frozen:
            self.frozen = True
            log.warning("no reward worker did anything for %.0f s, was one of them frozen? They are replaced", idle_s)
        return not self.frozen and bool(self.pool.active)

    def stop(self) -> None:
        """Kill the processes; what they were to do is lost."""
        self.pool.stop()  # type: ignore[no-untyped-call]
        self.pool.join()


def awaited(future: ProcessFuture[T], workers: Workers, patience_s: float, until: float = math.inf) -> T:
    """Return the result of a future; a broken pool forgets its tasks. until: monotonic seconds.

    Raises the worker's exception, BrokenProcessPool when no worker is left, or TimeoutError.
    """
    while not wait([future], WORKERS_POLL_S).done:
        if not workers.active(patience_s) and not future.done():
            raise BrokenProcessPool("the workers are gone, and the result with them")
        if time.monotonic() > until:
            raise FutureTimeoutError("no reward worker answered")
    result: T = future.result()
    return result


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Outcome of one call of `RewardPool.score`, in trajectories.

    scored: the function gave a verdict. missing: how many have none, by cause; only causes that occurred.
    metrics: means and counts of the components and metrics that the functions returned, by name (`Reward`).
    values: the inputs of metrics. The sum of two reports is the report of one call for all their trajectories.
    """

    scored: int
    missing: Mapping[MissingCause, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, list[float]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, scored: int, missing: Mapping[MissingCause, int], values: Mapping[str, list[float]]) -> ScoreReport:
        """Return the report of the given counts and values."""
        metrics = {name: _count_or_mean(numbers) for name, numbers in values.items()}
        return cls(scored, dict(missing), metrics, values)

    def __add__(self, other: ScoreReport) -> ScoreReport:
        names = dict.fromkeys([*self.values, *other.values])
        values = {name: [*self.values.get(name, ()), *other.values.get(name, ())] for name in names}
        missing = Counter(self.missing) + Counter(other.missing)
        return ScoreReport.of(self.scored + other.scored, missing, values)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The trajectories of one task: a single one, or several of one source that are awaited together."""

    route: str | None
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk given to `workers`; lost when these are gone, or do nothing for `patience_s`.

    times: Unix times of its beginning and, in the end, of its end.
    """

    chunk: _Chunk
    workers: Workers
    future: ProcessFuture[list[Scored]]
    patience_s: float
    times: list[float]

    @property
    def settled(self) -> bool:
        return self.future.done() or not self.workers.active(self.patience_s)

    def result(self) -> list[Scored]:
        """Return the outcomes. Raises the worker's exception, or BrokenProcessPool when no worker is left."""
        return awaited(self.future, self.workers, self.patience_s)  # a worker has a deadline


class RewardPool:
    """Worker processes for the configured reward functions, with a hard deadline for every trajectory.

    A process calls a function for one trajectory at a time, so a hang or crash affects that trajectory only, and the
    process is replaced. An `async` function is called for up to `concurrency` trajectories at once; when its process
    hangs or dies, each of them is scored again separately. Workers come from a fork server: they share no threads,
    devices or signal handlers with the caller. They ignore a SIGTERM to the whole job, because the current step still
    needs its rewards. A context manager.
    """

    def __init__(
        self, config: RewardConfig, search_path: Iterable[str] | None = None, log_path: Path | None = None
    ) -> None:
        """Start `config.workers` processes and make the reward functions in each; `search_path`: `extensions.path`.

        log_path: receives what they print; None: it goes where ours goes.

        Raises ExtensionError when a function cannot be imported, RewardWorkersLost when the workers do not come up.
        """
        self._config = config
        self._lock, self._closed = threading.Lock(), False
        named: list[tuple[str | None, Extension]] = [(None, config.function), *config.by_source.items()]
        routes: Routes = {source: (extension.name, extension.arguments) for source, extension in named}
        self._make = partial(
            ProcessPool,
            max_workers=config.workers,
            initializer=worker.start,
            initargs=(routes, [str(Path(folder).resolve()) for folder in search_path or ()], log_path),
            context=fork_server(math=any(name == "math_verify" for name, _ in routes.values())),
        )
        self._workers = Workers(self._make())
        try:
            self._traits, took_s = self._await_start()
        except BaseException:
            self.close()
            raise
        # A worker that is replaced makes the functions again.
        self._patience_s = config.timeout_s + GRACE_S + max(START_MARGIN_S, 3 * took_s)

    def _await_start(self) -> tuple[Mapping[str | None, worker.Traits], float]:
        """What the functions are, once all workers are up, and the seconds that it took. Raises as the constructor."""
        workers, renewals = self._config.workers, 0
        while True:
            began = time.monotonic()
            try:
                ready = [self._workers.pool.schedule(worker.traits, timeout=START_TIMEOUT_S) for _ in range(workers)]
                until = began + 2 * START_TIMEOUT_S  # a worker's own limit begins with the task
                traits, *_ = [awaited(future, self._workers, START_TIMEOUT_S, until) for future in ready]
                return traits, time.monotonic() - began
            except ExtensionError:
                raise
            except Exception as error:
                if renewals == WORKERS_RETRIES or not isinstance(error, BrokenProcessPool | ProcessExpired):
                    raise RewardWorkersLost(f"the {workers} reward workers did not start: {error!r}") from error
            renewals += 1
            self._renew()

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Set `reward` and `reward_components` of every trajectory, and count the outcomes.

        Timeouts, exceptions, crashes, None, figures that are not finite and names that cannot be metrics are no verdict
        (`Trajectory.no_verdict`), logged with prompt and sample. A crash is retried once, because something else may
        have killed the process.
        Raises RewardWorkersLost when all workers die repeatedly.
        """
        tasks = [self._schedule(chunk) for chunk in self._chunks(groups)]
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        for task in tasks:
            task.future.add_done_callback(wake)
        while not all(task.settled for task in tasks):
            ended.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), WORKERS_POLL_S)
        return await asyncio.to_thread(self._collect, tasks)  # what failed is scored again

    def _collect(self, tasks: Sequence[_Task]) -> ScoreReport:
        rewards: list[Reward] = []
        missing: Counter[MissingCause] = Counter()
        for task in tasks:
            outcomes = self._outcomes(task)
            # Where it has just ended the callback that notes the time may still be to come.
            began, ended = [*task.times, time.time()][:2]
            for (trajectory, _), found in zip(task.chunk.pairs, outcomes, strict=True):
                trajectory.scored_at = [began, ended]
                outcome = _of_its_turns(found, trajectory)
                if isinstance(outcome, NoVerdict):
                    _leave_unjudged(trajectory, outcome)
                    missing[outcome.cause] += 1
                    continue
                trajectory.reward, trajectory.reward_components = outcome.value, dict(outcome.components)
                turns = outcome.turns
                trajectory.turn_rewards = None if turns is None else [turn for turn in turns if turn is not None]
                trajectory.no_verdict = None
                rewards.append(outcome)
        return ScoreReport.of(len(rewards), missing, _values(rewards))

    def _chunks(self, groups: Sequence[Group]) -> Iterator[_Chunk]:
        """One trajectory each; with an `async` function several: at most the limit, a worker's fair share, or a group.

        Groups arrive one by one while a batch is sampled, so splitting each group would give workers too few concurrent
        calls.
        """
        together: dict[str | None, list[Pair]] = defaultdict(list)
        largest = max((len(group.trajectories) for group in groups), default=0)
        for group in groups:
            source = group.prompt.data_source
            route = source if source in self._config.by_source else None
            pairs = [(trajectory, group.prompt) for trajectory in group.trajectories]
            if self._traits[route].is_async:
                together[route] += pairs
            else:
                yield from (_Chunk(route, (pair,)) for pair in pairs)
        for route, pairs in together.items():
            share = math.ceil(len(pairs) / self._config.workers)
            size = min(self._config.concurrency, max(share, largest))
            yield from (_Chunk(route, tuple(pairs[i : i + size])) for i in range(0, len(pairs), size))

    def _schedule(self, chunk: _Chunk) -> _Task:
        sent = chunk
        if self._traits[chunk.route].text_only:
            sent = replace(chunk, pairs=tuple(map(_text_of, chunk.pairs)))
        timeout_s = self._config.timeout_s
        limit_s = timeout_s + (GRACE_S if len(sent.pairs) > 1 else 0.0)
        with self._lock:
            if not self._workers.active(self._patience_s):
                self._renew()
            future = self._given(sent, timeout_s, limit_s)
            times = [time.time()]
            future.add_done_callback(lambda _: times.append(time.time()))
            return _Task(chunk, self._workers, future, self._patience_s, times)

    def _given(self, sent: _Chunk, timeout_s: float, limit_s: float) -> ProcessFuture[list[Scored]]:
        """The future of a chunk in the pool, or in a new one where it is broken. Raises RewardWorkersLost."""
        renewals = 0
        while True:
            try:
                return self._workers.schedule(worker.score, (sent.route, sent.pairs, timeout_s), limit_s)
            except RuntimeError as error:  # also of a new pool whose processes, or their fork server, were killed
                if renewals == WORKERS_RETRIES:
                    raise RewardWorkersLost(
                        f"new reward workers did not start, {renewals} times ({error!r}); is something killing them?"
                    ) from error
            renewals += 1
            self._renew()

    def _renew(self) -> None:
        """Replace the pool: pebble's breaks when an idle process ends, or when none can be started."""
        if self._closed:
            raise RuntimeError("the reward workers were stopped")
        if not self._workers.frozen:  # or `active` has said so
            log.warning("the reward workers are gone, was one of them killed?")
        log.warning("starting %d new reward workers", self._config.workers)
        self._workers.stop()
        self._workers = Workers(self._make())

    def _outcomes(self, task: _Task, again: bool = True, renewals: int = WORKERS_RETRIES) -> list[Scored]:
        chunk = task.chunk
        try:
            return task.result()
        except (FutureTimeoutError, ProcessExpired) as error:
            if len(chunk.pairs) > 1:
                return self._score_each_again(chunk)
            if again and isinstance(error, ProcessExpired):
                return self._outcomes(self._schedule(chunk), False, renewals)
            if isinstance(error, FutureTimeoutError):
                return [worker.late_after(self._config.timeout_s)]
            return [NoVerdict("crash", f"the scorer failed ({error!r})")]
        except BrokenProcessPool as error:
            if renewals:
                return self._outcomes(self._schedule(chunk), again, renewals - 1)
            raise RewardWorkersLost(
                f"{_name(chunk.pairs[0][0])}: no result, the reward workers were gone {WORKERS_RETRIES + 1} times "
                f"({error}); is something killing them?"
            ) from error
        except Exception as error:  # not picklable: must neither end the run nor go unnoticed
            return [worker.raised(repr(error)) for _ in chunk.pairs]

    def _score_each_again(self, chunk: _Chunk) -> list[Scored]:
        """Score each trajectory of a chunk by itself: one of them stopped the worker, and nothing says which."""
        tasks = [self._schedule(_Chunk(chunk.route, (pair,))) for pair in chunk.pairs]
        outcomes: list[Scored] = []
        for task in tasks:  # after all are scheduled, so that they run at once
            outcomes += self._outcomes(task)
        return outcomes

    def close(self) -> None:
        """Stop the workers at once; idempotent."""
        with self._lock:
            self._closed = True
            self._workers.stop()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Scorer:
    """Scores groups by reward processes.

    penalty: for training batches; an evaluation has none. by_turn: whether the rewards of turns are trained on
    (`objective.credit`).
    """

    def __init__(self, pool: RewardPool, penalty: OverlongPenalty | None = None, *, by_turn: bool = False) -> None:
        self._pool, self._penalty, self._by_turn = pool, penalty, by_turn
        self._without_turns = set[str]()

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Give every trajectory its reward, shaping included. Raises as `RewardPool.score`."""
        report = await self._pool.score(groups)
        if self._penalty is not None:
            self._penalty.apply(groups)
        for group in groups if self._by_turn else ():
            source = group.prompt.data_source
            lacking = any(t.reward is not None and t.turn_rewards is None for t in group.trajectories)
            if lacking and source not in self._without_turns:
                self._without_turns.add(source)
                log.warning(
                    "objective.credit: turn, but the reward function of %r gives no rewards of turns "
                    "(Reward(turns=[...])): the last turn of a trajectory earns its whole reward",
                    source,
                )
        return report

    def metrics(self, groups: Sequence[Group], reports: Sequence[ScoreReport]) -> dict[str, float]:
        """`reward/*` of scored groups, given the reports of all calls that scored them.

        Mean and standard deviation are over the verdicts, and absent without any. Also the share of groups with a
        signal, the mean reward of each turn, and the metrics of the reward functions. What has no verdict is counted by
        cause; where nothing is missing, `timeouts` and `failures` alone are there.
        """
        report = functools.reduce(operator.add, reports)
        judged = [trajectory for group in groups for trajectory in group.trajectories if trajectory.no_verdict is None]
        verdicts = [verdict for group in groups for verdict in group.verdicts]
        metrics = {}
        if verdicts:
            metrics = {"reward/mean": statistics.fmean(verdicts), "reward/std": statistics.pstdev(verdicts)}
        metrics["reward/groups_mixed"] = sum(group.is_mixed(by_turn=self._by_turn) for group in groups) / len(groups)
        metrics |= _by_turn(groups) | {"reward/timeouts": 0.0, "reward/failures": 0.0}
        if report.missing:
            metrics |= _missing(groups, report)
        metrics |= {f"reward/{name}": value for name, value in report.metrics.items()}
        if self._penalty is not None and judged:
            metrics[f"reward/{OVERLONG}"] = statistics.fmean(t.reward_components[OVERLONG] for t in judged)
        return metrics


def _text_of(pair: Pair) -> Pair:
    """Without the tokens: for 8000 tokens, sending them takes longer than scoring with math-verify."""
    trajectory, prompt = pair
    return replace(trajectory, tokens=trajectory.tokens[:0]), replace(prompt, token_ids=())


def _of_its_turns(found: Scored, trajectory: Trajectory) -> Scored:
    """A reward as it is, unless its turns are not the turns of the trajectory: then no verdict."""
    if isinstance(found, NoVerdict) or found.turns is None or len(found.turns) == trajectory.turns:
        return found
    return worker.raised(
        f"Reward.turns has {len(found.turns)} rewards, and the trajectory {trajectory.turns} model turns "
        "(trajectory.turns): return one reward for each"
    )


def _leave_unjudged(trajectory: Trajectory, why: NoVerdict) -> None:
    # It is dumped, and an exception may quote the address of a judge with its login, or all of its answer.
    reason = printable(" ".join(hidden(why.reason).split()))[:_LONGEST_REASON]
    trajectory.reward, trajectory.reward_components, trajectory.turn_rewards = None, {}, None
    trajectory.no_verdict = replace(why, reason=reason)
    log.warning("%s: %s, no verdict", _name(trajectory), reason)


def _values(rewards: Sequence[Reward]) -> dict[str, list[float]]:
    """The values of every component and metric, of the trajectories that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for reward in rewards:
        for name, value in (*reward.components.items(), *reward.metrics.items()):
            found[name].append(value)
    return dict(found)


def _count_or_mean(values: Sequence[float]) -> float:
    """The count of flags, the mean of numbers."""
    return float(sum(values)) if all(isinstance(value, bool) for value in values) else statistics.fmean(values)


def _name(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt_id} sample {trajectory.sample_index}"


def _by_turn(groups: Sequence[Group]) -> dict[str, float]:
    earned: dict[int, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            for number, reward in enumerate(trajectory.turn_rewards or (), start=1):
                earned[number].append(reward)
    return {f"reward/turn/{number}": statistics.fmean(rewards) for number, rewards in sorted(earned.items())}


def _missing(groups: Sequence[Group], report: ScoreReport) -> dict[str, float]:
    missing = sum(report.missing.values())
    return {
        "reward/groups_unjudged": float(sum(group.unjudged for group in groups)),
        "reward/no_verdict": missing / (report.scored + missing),
        **{f"reward/{name}": float(report.missing.get(cause, 0)) for cause, name in COUNTS.items()},
    }
