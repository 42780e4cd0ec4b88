"""Sampling that runs ahead of the trainer: a thread that keeps engines and scorers busy, and a buffer between them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, Self

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines.tasks import FleetError, Request, Sampling
from ctpo_megatron.rollouts.buffer import OpenBatch, Place
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.groups import PromptStream, UniformGroups
from ctpo_megatron.rollouts.ledger import Ledger
from ctpo_megatron.rollouts.metrics import rollout_metrics, staleness_metrics
from ctpo_megatron.rollouts.quarantine import Quarantined
from ctpo_megatron.rollouts.source import Engines, Pending, Scorer, assemble

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_TURN_S = 0.1
"""Longest turn: what was published meanwhile is handed out after it."""
_SCORING_S = 0.02
"""The same while groups are scored."""
_LOOK_S = 0.5
"""Between two looks whether the run is asked to end."""
_JOIN_S = 30.0


class Turns(Protocol):
    """Plays groups in turns: `Dispatcher`."""

    on_hold: bool
    """While true nothing is handed out."""
    counts: Counter[str]

    def admit(self, place: Hashable, prompt: Prompt, request: Request) -> None:
        """Line up a prompt, or what takes its place if it is quarantined."""

    def dispatch(self) -> None:
        """Hand out what is lined up; by whoever holds the lock."""

    def turn(self, deliver: Callable[[Hashable, Group], None], longest_s: float) -> None:
        """Hand out, wait, deliver what is complete while the lock is held."""

    @property
    def playing(self) -> dict[Any, Prompt]:
        """Prompts that are lined up or in flight, by place."""

    @property
    def in_flight(self) -> int:
        """Groups that engines are playing."""

    def give_up(self, places: Collection[Hashable]) -> None:
        """Play the groups of these places no more; by whoever holds the lock."""

    def cancel(self) -> None:
        """Leave nothing running behind."""


class AheadEngines(Engines, Protocol):
    """Engines that play in turns, so that two threads can use them: `EnginePool`."""

    lock: Any
    """Re-entrant. Held: nobody submits to an engine, or replaces one."""

    def dispatcher(self) -> Turns:
        """For one thread; waits until the engines are up."""


class AheadScorer(Scorer, Protocol):
    """Its reports can be part of a checkpoint."""

    def report_record(self, report: Any) -> Any:
        """A report as JSON has it."""

    def report_of(self, record: Any) -> Any:
        """The report of a `report_record`."""


class AsyncRollouts:
    """Samples up to `rollout.max_staleness` versions ahead: a `RolloutSource`.

    The batch of step s is begun once version s - max_staleness is published. Batches consist of the next prompts of the
    stream, and are handed over in order; nothing is thrown away for its age. A context manager, which ends its thread.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engines: AheadEngines,
        scorer: AheadScorer,
        prompts: PromptStream,
        cancelled: Callable[[], bool],
        *,
        steps: int,
        mini_batch_prompts: int = 1,
    ) -> None:
        """cancelled: as for `Collector`. steps: the last batch is that of this step. mini_batch_prompts: groups of an
        optimizer step."""
        self._config, self._engines, self._scorer, self._prompts = config, engines, scorer, prompts
        self._cancelled, self._steps, self._mini = cancelled, steps, mini_batch_prompts
        self._filters, self._ledger = Filters(config.filters), Ledger()
        self._changed = threading.Condition(engines.lock)
        self._batches: list[OpenBatch] = []
        self._scoring: dict[Place, tuple[Group, Pending]] = {}
        self._version = 0
        self._next: int | None = None
        self._turns: Turns | None = None
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._failure: Exception | None = None
        self._closed = False
        self._turned = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                log.warning("the thread of the rollouts has not ended after %g s, and is left behind", _JOIN_S)

    def next_batch(self, step: int) -> Batch | None:
        """See `RolloutSource`. Raises what sampling and scoring raise, and AccountingError."""
        opened = self._await(step)
        if opened is None or opened.batch is None:
            return None
        batch, found = opened.batch, opened.batch.metrics
        found |= staleness_metrics(batch.groups, self._version) | {"rollout/generate_s": opened.seconds}
        with self._held():
            found |= {f"rollout/{name}": value for name, value in self._stats().items()}
            batch.sampler = self._prompts.state_dict()
        return batch

    def _stats(self) -> dict[str, float]:
        """Of the engines, and of the groups that were played in turns, since the last call."""
        stats = self._engines.stats()
        if self._turns is not None:
            for name, count in self._turns.counts.items():
                stats[name] += count
            self._turns.counts.clear()
        return stats

    def _await(self, step: int) -> OpenBatch | None:
        """The complete batch of a step, out of the buffer; None: the run is asked to end.

        Every group has its deadline (`rollout.group_timeout_s`) and so many retries, which bounds the wait while the
        thread takes its turns. Raises FleetError when it does not.
        """
        while not self._cancelled():
            with self._held():
                self._raise_failure()
                self._check_turns(step)
                opened = next(iter(self._batches), None)
                if opened is not None and opened.batch is not None:
                    if opened.step != step:
                        raise RuntimeError(f"step {step} asks for its batch, the next one is of step {opened.step}")
                    del self._batches[0]
                    self._ledger.hand_over(opened.batch)
                    self._check()
                    return opened
                self._changed.wait(_LOOK_S)
        return None

    def _check_turns(self, step: int) -> None:
        if time.monotonic() > self._turned + self._patience_s:
            there = f"{len(self._turns.playing) if self._turns else 0} groups to play, {len(self._scoring)} to score"
            late = f"has not ended its turn within {self._patience_s:g} s"
            raise FleetError(f"step {step} waits for the thread of the rollouts, which {late}; it has {there}")

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutSource`; within `updating`."""
        self._engines.begin_sync(named_tensors, version)

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """See `RolloutSource`. Raises what the thread has raised, and FleetError when it or a group is late."""
        turns = self._turns = self._turns or self._engines.dispatcher()
        try:
            if self._config.partial == "finish":
                self._finish_in_flight(turns)
            with self._held():
                self._raise_failure()
                yield
                self._version = version
                self._admit(turns)
                turns.on_hold = False
                turns.dispatch()
                self._changed.notify_all()
        finally:
            turns.on_hold = False
        if self._thread.ident is None:
            self._turned = time.monotonic()
            self._thread.start()

    def _finish_in_flight(self, turns: Turns) -> None:
        """Hand out nothing more, and return when no engine plays a group, or the run is asked to end."""
        deadline = time.monotonic() + self._config.group_timeout_s + _JOIN_S
        with self._held():
            turns.on_hold = True
            while turns.in_flight and not self._cancelled():
                self._raise_failure()
                if time.monotonic() > deadline:
                    late = f"{turns.in_flight} groups do not end, nor are given up (rollout.group_timeout_s)"
                    raise FleetError(f"the weights wait for what is in flight (rollout.partial: finish): {late}")
                self._changed.wait(_LOOK_S)

    def state_dict(self) -> dict[str, Any]:
        """Position of the prompt stream, prompts that are quarantined, and all that is sampled ahead.

        Raises AccountingError.
        """
        with self._held():
            self._check()
            in_flight = self._in_flight()
            batches = [opened.state_dict(in_flight, self._scorer.report_record) for opened in self._batches]
            return {
                "prompts": self._prompts.state_dict(),
                "quarantined": [asdict(record) for record in self._engines.quarantined],
                "ahead": {"shape": self._shape, "settled": self._ledger.state_dict(), "batches": batches},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RolloutSource`; before the first `updating`. The prompts that were in flight are sampled anew."""
        ahead = state.get("ahead", {})
        batches = ahead.get("batches", [])
        if batches and ahead["shape"] != self._shape:
            raise ValueError(
                "it holds groups that were sampled ahead with rollout.prompts_per_step and samples_per_prompt "
                f"{ahead['shape']}, this run has {self._shape}: give it those that it was begun with"
            )
        self._prompts.load_state_dict(state["prompts"])
        self._engines.quarantined[:] = [Quarantined(**record) for record in state["quarantined"]]
        self._batches = [self._restored(record) for record in batches]
        self._next = batches[-1]["step"] + 1 if batches else None
        under_way = [*(g.prompt for opened in self._batches for g in opened.groups), *self._in_flight().values()]
        settled = ahead.get("settled", {"trained": self._prompts.taken, "dropped": 0, "quarantined": 0})
        self._ledger.load_state_dict(settled, under_way)
        self._check()

    def _restored(self, record: Mapping[str, Any]) -> OpenBatch:
        opened = OpenBatch(record["step"], self._uniform(record["refills"]))
        prompts = self._prompts.named({group["prompt"] for group in record["groups"]})
        opened.load_groups(record["groups"], prompts, self._scorer.report_of)
        return opened

    @property
    def _shape(self) -> list[int]:
        return [self._config.prompts_per_step, self._config.samples_per_prompt]

    @property
    def _patience_s(self) -> float:
        """Longest turn of the thread: an engine that is replaced in it starts and is given weights."""
        return self._config.start_timeout_s + self._config.weights.timeout_s

    def _uniform(self, refills: int = 0) -> UniformGroups:
        return UniformGroups(self._config, self._prompts, self._mini, refills)

    # What follows holds the lock, but for `_work` and `_take_turn`, which are the thread.

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._changed.acquire(timeout=self._patience_s):
            raise FleetError(f"the thread of the rollouts has not let go of the engines for {self._patience_s:g} s")
        try:
            yield
        finally:
            self._changed.release()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check(self) -> None:
        """Every prompt that was consumed is accounted for."""
        buffered = [group.prompt.id for opened in self._batches for group in opened.groups]
        in_flight = [prompt.id for prompt in self._in_flight().values()]
        quarantined = {record.prompt_id for record in self._engines.quarantined}
        self._ledger.check(self._prompts.taken, buffered, in_flight, quarantined)

    def _in_flight(self) -> dict[Place, Prompt]:
        """Prompts whose groups are lined up, played or scored."""
        places = {(opened.step, place): prompt for opened in self._batches for place, prompt in opened.waiting.items()}
        if self._turns is not None:
            places |= self._turns.playing
        return places | {place: group.prompt for place, (group, _) in self._scoring.items()}

    def _admit(self, turns: Turns) -> None:
        """Begin the batches that may be begun with the version at hand."""
        for opened in self._batches:
            for place, prompt in opened.waiting.items():
                turns.admit((opened.step, place), prompt, self._request(opened.step))
            opened.waiting.clear()
        self._next = self._next or self._version  # the first step trains the version that is published first
        while self._next <= min(self._steps, self._version + self._config.max_staleness):
            opened = OpenBatch(self._next, self._uniform())
            self._batches.append(opened)
            self._draw(opened, self._prompts.take(self._config.prompts_per_step + self._config.oversample), turns)
            self._next += 1

    def _draw(self, opened: OpenBatch, prompts: Sequence[Prompt], turns: Turns) -> None:
        self._ledger.draw(prompts)
        for prompt in prompts:
            place, opened.drawn = opened.drawn, opened.drawn + 1
            turns.admit((opened.step, place), prompt, self._request(opened.step))

    def _request(self, step: int) -> Request:
        config = self._config
        sampling = Sampling(config.temperature, config.top_p, config.top_k)
        return Request(step, config.samples_per_prompt, sampling, self._replacement)

    def _replacement(self) -> Prompt:
        [prompt] = self._prompts.take(1)
        self._ledger.replace(prompt)
        return prompt

    def _work(self) -> None:
        assert self._turns is not None  # made before the thread is started
        try:
            while self._take_turn(self._turns):
                pass
        except Exception as error:  # whatever it is, whoever waits for a batch raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._turns.cancel()

    def _take_turn(self, turns: Turns) -> bool:
        """Play, score and complete what there is; False: it is closed."""
        with self._changed:
            if not self._closed and not turns.playing and not self._scoring:
                self._changed.wait(_LOOK_S)
        if self._closed:
            return False
        turns.turn(self._deliver, _SCORING_S if self._scoring else _TURN_S)
        with self._changed:
            self._turned = time.monotonic()
            self._take_scores()
            for opened in self._batches:
                if opened.batch is None and len(opened.scored) >= self._wanted(opened):
                    self._give_up_late(opened, turns)
                    self._complete(opened, turns)
            self._changed.notify_all()
        return True

    def _deliver(self, place: Any, group: Group) -> None:
        self._scoring[place] = (group, self._scorer.begin([group]))

    def _take_scores(self) -> None:
        opened = {each.step: each for each in self._batches}
        for step, place in [place for place, (_, pending) in self._scoring.items() if pending.done]:
            group, pending = self._scoring.pop((step, place))
            opened[step].add(place, group, pending.result())

    def _wanted(self, opened: OpenBatch) -> int:
        """More than a batch only after refills: a run that was resumed may have drawn by other settings before."""
        refilled = self._config.uniform_groups == "refill" and opened.uniform.refills > 0
        return opened.drawn if refilled else self._config.prompts_per_step

    def _give_up_late(self, opened: OpenBatch, turns: Turns) -> None:
        """The batch is complete without the groups that are not scored, or were scored last."""
        late = {place: prompt for place, prompt in self._in_flight().items() if place[0] == opened.step}
        turns.give_up(late)
        for place in late:
            self._scoring.pop(place, None)
        prompts = [*late.values(), *opened.keep_first(self._wanted(opened))]
        self._ledger.give_up(prompts)
        turns.counts["late_groups"] += len(prompts)

    def _complete(self, opened: OpenBatch, turns: Turns) -> None:
        """Nothing of the batch is under way: draw further prompts, or make of it what the trainer takes."""
        groups = opened.groups
        if further := opened.uniform.further(groups):
            return self._draw(opened, further, turns)
        metrics = rollout_metrics(groups) | self._scorer.metrics(groups, opened.ordered_reports)
        opened.batch = assemble(groups, metrics, opened.uniform, self._filters)
