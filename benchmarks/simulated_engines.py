"""Engines that take simulated time, for the product's scheduler, with episodes of recorded lengths.

An engine decodes all its sequences at once; a decoding step takes a fixed time and a little more for each token of
their contexts. Prefill stops decoding. Where the cache is full the sequence that began last is preempted, and computed
again later. A sequence leaves the engine while its tool runs; its keys are cached until the cache runs short.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from benchmarks.simulated_time import Clock
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tool_call import ToolCall
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupTask

FIRST_ID, LAST_ID = 257, 7_000
"""Token ids that trajectories are made of."""
OBSERVATION_TOKENS = 40
WATERMARK = 0.99
"""Share of the cache up to which sequences are admitted."""


@dataclass(frozen=True)
class Speed:
    """Seconds of one engine. step_s, token_s: of a decoding step, and more for each token of context in it.

    cache_tokens: tokens whose keys fit. start_s: a new process until it serves. update_s: new weights. sleep_s: to
    sleep or wake. tool_s: mean of a call.
    """

    step_s: float
    token_s: float
    prefill_token_s: float
    update_s: float
    cache_tokens: float = math.inf
    sleep_s: float = 5.0
    start_s: float = 60.0
    tool_s: float = 0.5


class Workload:
    """Episodes by prompt: one to four turns, whose model tokens together have a length that was recorded.

    groups: `[prompts, samples]` recorded lengths, scaled to a mean of `mean_tokens` and cut at `longest`. A prompt has
    the lengths of one recorded group for good, so that its last responses tell something of the next ones.
    """

    def __init__(self, groups: Sequence[Sequence[int]], mean_tokens: float, longest: int, prompts: int) -> None:
        lengths = np.array(groups, dtype=np.float64)
        for _ in range(50):  # the cut lowers the mean
            lengths *= mean_tokens / np.minimum(lengths, longest).mean()
        self._lengths = np.maximum(4, np.minimum(lengths, longest)).astype(np.int64)
        self._rng = np.random.default_rng(0)
        context = tuple(self._ids(150).tolist())
        self.prompts = [
            Prompt(f"p{n}", "math", ({"role": "user", "content": "q"},), str(n), context) for n in range(prompts)
        ]
        self._numbers = {prompt.id: n for n, prompt in enumerate(self.prompts)}

    def _ids(self, count: int) -> Any:
        return self._rng.integers(FIRST_ID, LAST_ID, count)

    def turns(self, prompt: Prompt, seed: str) -> list[int]:
        """Model tokens of each turn of one episode."""
        rng = random.Random(seed)
        length = int(rng.choice(self._lengths[self._numbers[prompt.id] % len(self._lengths)]))
        turns = rng.randint(1, 4)
        return [max(1, length // turns)] * turns

    def trajectory(self, episode: _Episode) -> Trajectory:
        """What the engine would answer."""
        prompt = episode.prompt
        made = Trajectory(prompt.id, episode.sample, seed=episode.sample, finish_reason="answer")
        made.append_context(prompt.token_ids, 0)
        for turn, (count, versions) in enumerate(zip(episode.turns, episode.versions, strict=True), 1):
            made.append_model(self._ids(count), -self._rng.exponential(0.4, count), np.concatenate(versions), turn)
            if turn < len(episode.turns):
                made.append_context(self._ids(OBSERVATION_TOKENS), turn)
                call = ToolCall(turn, "code_interpreter", {"code": "print(1)"}, "success", "1\n", 0.2, 0.1)
                made.tool_calls.append(call)
        right = self._rng.random() < 0.5
        made.final_text = f"hence \\boxed{{{self._numbers[prompt.id] + int(right)}}}"
        return made


@dataclass
class _Episode:
    prompt: Prompt
    sample: int
    step: int
    turns: list[int]
    reference: Reference
    versions: list[list[Any]]
    """Of the tokens of each turn, in the parts between which it was preempted."""
    turn: int = 0
    sampled: int = 0
    """Tokens of this turn until it was preempted."""
    to_compute: int = 0
    """Tokens whose keys are in no cache."""
    evictions: int = 0
    """What the engine's count was when this episode left it for its tool."""
    began: float = 0.0
    """Tokens that the engine had decoded for every sequence when this one was admitted."""

    @property
    def context(self) -> int:
        """Tokens until now."""
        before = sum(self.turns[: self.turn]) + self.turn * OBSERVATION_TOKENS
        return len(self.prompt.token_ids) + before + self.sampled


@dataclass(eq=False)
class Reference:
    """Of a group in flight; see `ray.ObjectRef`."""

    left: int = 0
    done: bool = False
    cancelled: bool = False
    error: Exception | None = None
    episodes: list[_Episode] = field(default_factory=list)
    done_at: float = math.inf


class Engine:
    """One engine, as the scheduler sees an `EngineHandle`.

    busy_s: seconds of decoding and prefill. again_s: the part of prefill that computes keys again. preempted: count.
    """

    def __init__(self, index: int, clock: Clock, speed: Speed, seats: int, workload: Workload) -> None:
        self.index, self.name, self.log_path = index, f"engine {index}", Path(f"engine_{index}.log")
        self.live, self.parked, self.starting, self.dead = True, False, False, False
        self.launches, self.deadline, self.ready_ref = 1, math.inf, Reference()
        self.version = 0
        self.busy_s = self.again_s = 0.0
        self.preempted = 0
        self._clock, self._speed, self._seats, self._workload = clock, speed, seats, workload
        self._numbers = itertools.count()
        self._reset()

    def _reset(self) -> None:
        self._running: list[tuple[float, int, _Episode]] = []
        self._queue: list[tuple[int, int, _Episode]] = []
        self._references: set[Reference] = set()
        self._decoded, self._at, self._evictions = 0.0, self._clock.now, 0
        self._base = 0.0
        self._updates: list[tuple[float, int]] = [(0.0, self.version)]
        self._alarm = object()

    def submit(self, task: GroupTask) -> Reference:
        """Begin a group."""
        with self._clock.free():
            self._catch_up()
            reference = Reference(left=len(task.samples))
            if self.dead:
                self._end(reference, RayActorError())
                return reference
            self._references.add(reference)
            for sample in task.samples:
                turns = self._workload.turns(task.prompt, f"{task.prompt.id}/{task.step}/{sample}/{task.occurrence}")
                episode = _Episode(task.prompt, sample, task.step, turns, reference, [[] for _ in turns])
                reference.episodes.append(episode)
                self._enqueue(episode, episode.context)
            self._plan()
        return reference

    def _enqueue(self, episode: _Episode, to_compute: int) -> None:
        episode.to_compute = to_compute
        heapq.heappush(self._queue, (episode.step, next(self._numbers), episode))
        self._admit()

    @property
    def _held(self) -> float:
        """Tokens in the cache."""
        return self._base + len(self._running) * self._decoded

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._seats:
            _, number, episode = self._queue[0]
            if not episode.reference.cancelled:
                if self._running and self._held + episode.context > WATERMARK * self._speed.cache_tokens:
                    self._evictions += 1
                    return
                again = bool(episode.turn or episode.sampled) and episode.to_compute == episode.context
                self._prefill(episode.to_compute, again=again)
                episode.began = self._decoded
                self._base += episode.context - self._decoded
                tokens = episode.turns[episode.turn] - episode.sampled
                heapq.heappush(self._running, (self._decoded + tokens, number, episode))
            heapq.heappop(self._queue)

    def _prefill(self, tokens: float, *, again: bool = False) -> None:
        seconds = tokens * self._speed.prefill_token_s
        self._at += seconds
        self.busy_s += seconds
        if again:
            self.again_s += seconds

    def _seconds(self, tokens: float) -> float:
        """To decode so many tokens of each sequence that runs; contexts grow meanwhile."""
        growth = len(self._running) * self._speed.token_s
        return tokens * (self._speed.step_s + self._speed.token_s * self._held + growth * tokens / 2)

    def _tokens(self, seconds: float) -> float:
        """The inverse of `_seconds`."""
        rate = self._speed.step_s + self._speed.token_s * self._held
        growth = len(self._running) * self._speed.token_s
        return 2 * seconds / (rate + math.sqrt(rate * rate + 2 * growth * seconds))

    def _next(self) -> tuple[float, bool]:
        """What the count of decoded tokens is when a turn ends, or else (False) when the cache is full."""
        ends, running = self._running[0][0], len(self._running)
        full = self._decoded + max(0.0, self._speed.cache_tokens - self._held) / running
        return (ends, True) if running == 1 or ends <= full else (full, False)

    def _catch_up(self) -> None:
        """Decode until now. `_at`: until when it has; later than now while it prefills or takes weights."""
        while self._running:
            until, ended = self._next()
            ends = self._at + self._seconds(until - self._decoded)
            if ends > self._clock.now:
                break
            self.busy_s += ends - self._at
            self._at, self._decoded = ends, until
            if ended:
                _, _, episode = heapq.heappop(self._running)
                self._leave(episode)
                self._end_turn(episode)
            else:
                self._preempt()
            self._admit()
        if self._clock.now > self._at:
            if self._running:
                self._decoded += self._tokens(self._clock.now - self._at)
                self.busy_s += self._clock.now - self._at
            self._at = self._clock.now

    def _leave(self, episode: _Episode) -> None:
        """The episode runs no longer: note what it has sampled, and the versions."""
        self._base = self._base - (episode.context - episode.began) if self._running else 0.0
        most = episode.turns[episode.turn] - episode.sampled
        count = min(most, round(self._decoded - episode.began))
        starts, versions = zip(*self._updates, strict=True)
        places = np.searchsorted(starts, episode.began + np.arange(count), side="right") - 1
        episode.versions[episode.turn].append(np.array(versions)[places])
        episode.sampled += count

    def _preempt(self) -> None:
        """Take the cache of the sequence that began last."""
        last = max(self._running, key=lambda entry: (entry[2].step, entry[1]))
        self._running.remove(last)
        heapq.heapify(self._running)
        self._leave(last[2])
        last[2].to_compute = last[2].context
        heapq.heappush(self._queue, (last[2].step, last[1], last[2]))
        self.preempted += 1
        self._evictions += 1

    def _end_turn(self, episode: _Episode) -> None:
        episode.turn, episode.sampled = episode.turn + 1, 0
        if episode.turn < len(episode.turns):
            seconds = random.expovariate(1.0 / self._speed.tool_s)
            launch, episode.evictions = self.launches, self._evictions
            self._clock.at(self._at + seconds, lambda: self._resume(episode, launch))
            return
        reference = episode.reference
        reference.left -= 1
        if not reference.left:
            self._end(reference)

    def _resume(self, episode: _Episode, launch: int) -> None:
        if launch == self.launches and not self.dead and not episode.reference.cancelled:
            self._catch_up()
            cached = episode.evictions == self._evictions
            self._enqueue(episode, OBSERVATION_TOKENS if cached else episode.context)
            self._plan()

    def _end(self, reference: Reference, error: Exception | None = None) -> None:
        reference.done, reference.error, reference.done_at = True, error, self._at
        self._references.discard(reference)

    def _plan(self) -> None:
        """Look again when the next turn ends, or the cache is full."""
        self._alarm = alarm = object()
        if self._running:
            ends = self._at + self._seconds(self._next()[0] - self._decoded)
            self._clock.at(ends, lambda: self._wake(alarm))

    def _wake(self, alarm: object) -> None:
        if alarm is self._alarm:
            self._catch_up()
            self._plan()

    def take_stock(self) -> None:
        """Have `busy_s` up to now."""
        self._catch_up()

    def cancel(self, reference: Reference) -> None:
        """Stop sampling a group, whose result is not needed."""
        with self._clock.free():
            self._catch_up()
            reference.cancelled = True
            self._references.discard(reference)
            kept = [entry for entry in self._running if entry[2].reference is not reference]
            self._base = sum(episode.context - episode.began for _, _, episode in kept)
            self._running = kept
            heapq.heapify(self._running)
            self._admit()
            self._plan()

    def take_weights(self, version: int) -> None:
        """Stop decoding for as long as an update takes; then the tokens in flight are computed again."""
        self._catch_up()
        self.version = version
        self._updates.append((self._decoded, version))
        self._at = max(self._at, self._clock.now) + self._speed.update_s
        self._prefill(self._held, again=True)
        self._evictions += 1
        self._plan()

    def die(self) -> None:
        """All that is in flight is lost."""
        self._catch_up()
        for reference in list(self._references):
            self._end(reference, RayActorError())
        self._reset()
        self.dead = True

    def launch(self) -> None:
        """Begin a new process."""
        self.launches += 1
        self.live, self.parked, self.starting, self.dead, self.ready_ref = False, False, True, False, Reference()
        self._reset()
        self._clock.at(self._clock.now + self._speed.start_s, self._started)

    def _started(self) -> None:
        self.ready_ref.done = True

    def park(self) -> None:
        """Wait for weights."""
        self.parked, self.starting = True, False

    def admit(self) -> None:
        """Serve from now on."""
        self.live, self.parked, self.starting = True, False, False

    def kill(self) -> None:
        """It is dead already."""
        self.live = False

    def responds(self) -> bool:
        """Whether it is alive."""
        return self.live and not self.dead

    def take_finished(self) -> list[Trajectory]:
        """Nothing: no request of a training run is early."""
        return []

    def forget_finished(self) -> None:
        """Nothing was asked."""
