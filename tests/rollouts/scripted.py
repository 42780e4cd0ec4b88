"""A stand-in for engines and scorers that follows a script: made-up episodes and rewards, in an order of its own."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.data.verdict import NoVerdict
from ctpo_megatron.engines import pool_stats
from ctpo_megatron.environments.seeds import trajectory_seed
from ctpo_megatron.rollouts import Answers, Quarantined, Request


class ScriptedGenerator:
    """Samples made-up episodes, a few groups a tick: a `Generator`.

    Of each trajectory one token is sampled when it begins and one when it ends. lost: prompts that always fail. stuck:
    slots that do not end until they are taken out of it. version: of the weights.
    """

    def __init__(self, seed: float = 0, lost: Iterable[str] = (), stuck: Iterable[tuple[int, int]] = ()) -> None:
        self.lock = threading.RLock()
        self.on_hold = False
        self.version = 0
        self.quarantined: list[Quarantined] = []
        self.begun: dict[Hashable, int] = {}  # slot -> version
        self.requests: list[Request] = []
        self.lost, self.stuck = set(lost), set(stuck)
        self.rng = random.Random(seed)
        self.in_update = 0
        self.counts: Counter[str] = Counter()
        self._queue: list[tuple[Hashable, Prompt, Request, int]] = []
        self._sampling: dict[Hashable, tuple[Prompt, Request, int, int]] = {}

    def update(self, trainer: Any, version: int) -> None:
        """Also while trajectories are in flight."""
        self.in_update, self.version = self.in_flight, version

    def wait_ready(self) -> None:
        """Always ready."""

    def stats(self) -> dict[str, float]:
        counts, self.counts = self.counts, Counter()
        return pool_stats(counts)

    def add(self, slot: Hashable, prompt: Prompt, request: Request) -> None:
        self.requests.append(request)
        while prompt.id in self.lost:
            if prompt.id not in {record.prompt_id for record in self.quarantined}:
                self.quarantined.append(Quarantined(prompt.id, request.step, "made up"))
                self.counts["quarantined"] += 1
            if request.replacements is None:
                return
            prompt = next(request.replacements)
        occurrence = request.occurrence(prompt) if request.occurrence is not None else 0
        self._queue.append((slot, prompt, request, occurrence))

    def submit(self) -> None:
        while self._queue and not self.on_hold:
            slot, prompt, request, occurrence = self._queue.pop(0)
            self.begun[slot] = self.version
            self._sampling[slot] = (prompt, request, self.version, occurrence)

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.0005)
        with self.lock:
            self.submit()

    def collect(self) -> Answers:
        able = [slot for slot in self._sampling if slot not in self.stuck]
        answers = Answers()
        for slot in self.rng.sample(able, min(3, len(able))):
            prompt, request, version, occurrence = self._sampling.pop(slot)
            seeds = [trajectory_seed(0, request.step, prompt.id, n, occurrence) for n in range(request.samples)]
            group = [self.play(prompt, n, seed, version) for n, seed in enumerate(seeds)]
            answers.groups.append((slot, Group(prompt, group)))
        return answers

    def play(self, prompt: Prompt, sample: int, seed: int, began: int) -> Trajectory:
        result = Trajectory(prompt.id, sample, seed, finish_reason="answer")
        result.append_context(prompt.token_ids, turn=0)
        result.append_model([7, 8 + sample], [-0.5, -0.25], [began, self.version], turn=1)
        return result

    @property
    def pending(self) -> Mapping[Any, Prompt]:
        queued = {slot: prompt for slot, prompt, _, _ in self._queue}
        return queued | {slot: prompt for slot, (prompt, *_) in self._sampling.items()}

    @property
    def in_flight(self) -> int:
        return len(self._sampling)

    def discard(self, slots: Collection[Hashable]) -> None:
        self._queue = [job for job in self._queue if job[0] not in slots]
        self._sampling = {slot: job for slot, job in self._sampling.items() if slot not in slots}

    def cancel(self) -> None:
        with self.lock:
            self.discard(self.pending)


UNJUDGED = NoVerdict("exception", "the script has no reward for it")


class Scored:
    """Scores that are there at the second check. The report counts groups."""

    def __init__(self, groups: Sequence[Group], reward: Callable[[str, int], float | None]) -> None:
        self._groups, self._reward, self._checks = groups, reward, 0

    @property
    def done(self) -> bool:
        self._checks += 1
        return self._checks > 1

    def result(self) -> int:
        for group in self._groups:
            for trajectory in group.trajectories:
                trajectory.reward = self._reward(group.prompt.id, trajectory.sample_index)
                trajectory.no_verdict = UNJUDGED if trajectory.reward is None else None
        return len(self._groups)


class ScriptedScorer:
    """A `Scorer` by a function of prompt id and sample index; keeps the ids that it was given."""

    def __init__(self, reward: Callable[[str, int], float | None] = lambda _, sample: float(sample)) -> None:
        self._reward = reward
        self.begun: list[str] = []

    def begin(self, groups: Sequence[Group]) -> Scored:
        self.begun += [group.prompt.id for group in groups]
        return Scored(groups, self._reward)

    def metrics(self, groups: Sequence[Group], reports: Sequence[int]) -> dict[str, float]:
        assert len(groups) == sum(reports)
        rewards = [reward for group in groups for reward in group.verdicts]
        return {"reward/mean": sum(rewards) / len(rewards)}

    def report_record(self, report: int) -> int:
        return report

    report_of = report_record


class Stops:
    """A stop signal that is set at certain checks, the last of which repeats."""

    def __init__(self, *checks: bool) -> None:
        self._checks = list(checks) or [False]

    def is_set(self) -> bool:
        return self._checks.pop(0) if len(self._checks) > 1 else self._checks[0]
