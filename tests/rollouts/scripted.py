"""A stand-in for engines and scorers that follows a script: made-up episodes and rewards, in an order of its own."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.data.records import NoVerdict, Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.engines import GroupLost, GroupTask
from ctpo_megatron.environments import trajectory_seed
from ctpo_megatron.rewards import ScoreReport
from ctpo_megatron.rollouts import Quarantined, Rollouts
from ctpo_megatron.tracking import Phases

LONGEST_S = 0.004
"""Of an episode."""


@dataclass
class ScriptedEngine:
    """One of `ScriptedEngines`."""

    index: int
    live: bool = True

    @property
    def name(self) -> str:
        return f"scripted engine {self.index}"


class ScriptedEngines:
    """Samples made-up episodes: what a `GroupSampler` uses in place of an `EnginePool`.

    Of each trajectory one token is sampled when it begins and one when it ends. lost: prompts that always fail. stuck:
    groups, by step and place among those of the step that have begun, which do not end until they are taken out of it.
    version: of the weights. begun: step and place -> version. tasks: all, in the order in which they began.
    """

    def __init__(self, seed: float = 0, lost: Iterable[str] = (), stuck: Iterable[tuple[int, int]] = ()) -> None:
        self.engines = [ScriptedEngine(0), ScriptedEngine(1)]
        self.version, self.in_update = 0, 0
        self.begun: dict[tuple[int, int], int] = {}
        self._places: Counter[int] = Counter()
        self.tasks: list[GroupTask] = []
        self.lost, self.stuck = set(lost), set(stuck)
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.in_flight = self.cancelled = 0
        self.observers: list[Callable[[], None]] = []
        self.failure: BaseException | None = None

    async def sample(self, engine: ScriptedEngine, task: GroupTask) -> list[Trajectory]:
        self.tasks.append(task)
        if task.prompt.id in self.lost:
            raise GroupLost("made up")
        place = task.step, self._places[task.step]
        self._places[task.step] += 1
        self.begun[place], began = self.version, self.version
        self.in_flight += 1
        try:
            await asyncio.sleep(self.rng.random() * LONGEST_S)
            while place in self.stuck:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        seeds = [trajectory_seed(0, task.step, task.prompt.id, n, task.occurrence) for n in task.samples]
        return [self.play(task.prompt, n, seed, began) for n, seed in zip(task.samples, seeds, strict=True)]

    def play(self, prompt: Prompt, sample: int, seed: int, began: int) -> Trajectory:
        result = Trajectory(prompt.id, sample, seed, finish_reason="answer")
        result.append_context(prompt.token_ids, turn=0)
        result.append_model([7, 8 + sample], [-0.5, -0.25], [began, self.version], turn=1)
        return result

    def send(self, trainer: Any, version: int) -> None:
        """Also while trajectories are in flight."""
        self.in_update, self.version = self.in_flight, version

    def notify(self, failure: BaseException | None = None) -> None:
        """An engine serves that did not, or none can any more."""
        self.failure = failure
        for observer in self.observers:
            observer()

    def wait_ready(self) -> None:
        """Always ready."""

    async def check(self, engine: ScriptedEngine) -> None:
        """It always answers."""

    def stats(self) -> dict[str, float]:
        counts, self.counts = self.counts, Counter()
        return {**counts}


class BrokenEngines(ScriptedEngines):
    """They are gone as soon as a group has begun."""

    async def sample(self, engine: ScriptedEngine, task: GroupTask) -> list[Trajectory]:
        asyncio.get_running_loop().call_soon(self.notify, RuntimeError("all engines are gone"))
        return await super().sample(engine, task)


UNJUDGED = NoVerdict("exception", "the script has no reward for it")


class ScriptedScorer:
    """A `Scorer` by a function of prompt id and sample index. begun: the ids that it was given. reports: of the last
    batch."""

    def __init__(self, reward: Callable[[str, int], float | None] = lambda _, sample: float(sample)) -> None:
        self._reward = reward
        self.begun: list[str] = []
        self.reports: list[ScoreReport] = []

    async def score(self, groups: Sequence[Group]) -> ScoreReport:
        self.begun += [group.prompt.id for group in groups]
        await asyncio.sleep(0.0005)
        for group in groups:
            for trajectory in group.trajectories:
                trajectory.reward = self._reward(group.prompt.id, trajectory.sample_index)
                trajectory.no_verdict = UNJUDGED if trajectory.reward is None else None
        return ScoreReport(len(groups))

    def metrics(self, groups: Sequence[Group], reports: Sequence[ScoreReport]) -> dict[str, float]:
        assert len(groups) == sum(report.scored for report in reports)
        self.reports = list(reports)
        rewards = [reward for group in groups for reward in group.verdicts]
        return {"reward/mean": sum(rewards) / len(rewards)}


class RecordedPhases(Phases):
    """Keeps the names of the phases, and counts what advances."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.advanced = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    def advance(self) -> None:
        self.advanced += 1


def quarantined(source: Rollouts) -> list[Quarantined]:
    return source._sampler.quarantined


class Stops:
    """A stop signal that is set at certain checks, the last of which repeats."""

    def __init__(self, *checks: bool) -> None:
        self._checks = list(checks) or [False]

    def is_set(self) -> bool:
        return self._checks.pop(0) if len(self._checks) > 1 else self._checks[0]
