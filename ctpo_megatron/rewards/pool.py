"""Scores trajectories in worker processes that are killed when a reward function hangs, as a run trains on them."""

from __future__ import annotations

import functools
import logging
import math
import operator
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pebble import ProcessExpired, ProcessPool

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.base.text import hidden, printable
from ctpo_megatron.data.records import MissingCause, NoVerdict
from ctpo_megatron.rewards import worker
from ctpo_megatron.rewards.fork_server import fork_server
from ctpo_megatron.rewards.overlong import OVERLONG, OverlongPenalty
from ctpo_megatron.rewards.protocol import COUNTS, Reward
from ctpo_megatron.rewards.worker import Pair, Routes, Scored
from ctpo_megatron.rewards.workers import RETRIES, RewardWorkersLost, Workers

if TYPE_CHECKING:
    from ctpo_megatron.config import Extension, RewardConfig
    from ctpo_megatron.data.trajectory import Group, Trajectory

_LONGEST_REASON = 1000
GRACE_S = 1.0  # after the deadline, for a worker to discard what it awaits, before it is killed
START_MARGIN_S = 5.0  # at least, for a worker that was killed to be replaced
START_TIMEOUT_S = 120.0  # for all workers to start and load the reward functions
Chunk = tuple[str | None, tuple[Pair, ...]]
"""The source of a reward function, and the trajectories of one call: one, or several that are awaited together."""

log = logging.getLogger(__name__)


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
        named: list[tuple[str | None, Extension]] = [(None, config.function), *config.by_source.items()]
        routes: Routes = {source: (extension.name, extension.arguments) for source, extension in named}
        make = partial(
            ProcessPool,
            max_workers=config.workers,
            initializer=worker.start,
            initargs=(routes, [str(Path(folder).resolve()) for folder in search_path or ()], log_path),
            context=fork_server(math=any(name == "math_verify" for name, _ in routes.values())),
        )
        self._workers, began = Workers(make, START_TIMEOUT_S), time.monotonic()
        try:
            self._traits = self._started()
        except BaseException:
            self.close()
            raise
        # A worker that is replaced makes the functions again.
        took_s = time.monotonic() - began
        self._workers.patience_s = config.timeout_s + GRACE_S + max(START_MARGIN_S, 3 * took_s)

    def _started(self) -> Mapping[str | None, worker.Traits]:
        """What the functions are, once all workers are up. Raises as the constructor."""
        count = self._config.workers
        found = self._workers.run(worker.traits, [()] * count, START_TIMEOUT_S, RETRIES)
        for error in (each for each in found if isinstance(each, BaseException)):
            if isinstance(error, ExtensionError):
                raise error
            raise RewardWorkersLost(f"the {count} reward workers did not start: {error!r}") from error
        return next(each for each in found if not isinstance(each, BaseException))

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        """Set `reward` and `reward_components` of every trajectory, and count the outcomes.

        Timeouts, exceptions, crashes, None, figures that are not finite and names that cannot be metrics are no verdict
        (`Trajectory.no_verdict`), logged with prompt and sample. A crash is retried once, because something else may
        have killed the process.
        Raises RewardWorkersLost when all workers die repeatedly.
        """
        began = time.time()
        judged: list[tuple[Trajectory, Scored]] = []
        alone, together = list[Chunk](), list[Chunk]()
        for chunk in self._chunks(groups):
            (together if len(chunk[1]) > 1 else alone).append(chunk)
        for (route, pairs), found in zip(together, await self._called(together, GRACE_S, again=0), strict=True):
            if isinstance(found, TimeoutError | ProcessExpired):  # by one of them, and nothing says which
                alone += [(route, (pair,)) for pair in pairs]
            else:
                outcomes = [worker.raised(repr(found))] * len(pairs) if isinstance(found, BaseException) else found
                judged += [(trajectory, each) for (trajectory, _), each in zip(pairs, outcomes, strict=True)]
        for (_, ((trajectory, _),)), found in zip(alone, await self._called(alone, 0.0, again=1), strict=True):
            judged.append((trajectory, self._outcome(found)))
        return _report(judged, [began, time.time()])

    async def _called(self, chunks: Sequence[Chunk], grace_s: float, again: int) -> list[list[Scored] | BaseException]:
        """What the worker returned or raised for each chunk."""
        timeout_s = self._config.timeout_s
        sent = [
            (route, [*map(_text_of, pairs)] if self._traits[route].text_only else pairs, timeout_s)
            for route, pairs in chunks
        ]
        return await self._workers.call(worker.score, sent, timeout_s + grace_s, again)

    def _outcome(self, found: list[Scored] | BaseException) -> Scored:
        """The outcome of a trajectory that was scored alone."""
        match found:
            case list():
                return found[0]
            case TimeoutError():
                return worker.late_after(self._config.timeout_s)
            case ProcessExpired():
                return NoVerdict("crash", f"the scorer failed ({found!r})")
        return worker.raised(repr(found))  # not picklable: must neither end the run nor go unnoticed

    def _chunks(self, groups: Sequence[Group]) -> Iterator[Chunk]:
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
                yield from ((route, (pair,)) for pair in pairs)
        for route, pairs in together.items():
            share = math.ceil(len(pairs) / self._config.workers)
            size = min(self._config.concurrency, max(share, largest))
            yield from ((route, tuple(pairs[i : i + size])) for i in range(0, len(pairs), size))

    def close(self) -> None:
        """Stop the workers at once; idempotent."""
        self._workers.close()

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


def _report(judged: Sequence[tuple[Trajectory, Scored]], times: list[float]) -> ScoreReport:
    """Write the outcomes into the trajectories, and count them."""
    rewards, missing = list[Reward](), Counter[MissingCause]()
    for trajectory, found in judged:
        trajectory.scored_at = [*times]
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
