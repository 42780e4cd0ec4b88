"""Training batches: prompts are drawn, sampled, scored and filtered, in the order of the data, ahead or not.

`rollout.max_staleness` is the one difference. 0: a batch is begun when it is requested, in the caller's thread. k: a
thread begins the batch of step s once version s - k is published, and keeps engines and scorers busy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from ctpo_megatron.base.stop import STOP_POLL_S, Cancelled, Stop
from ctpo_megatron.config import Config, RolloutConfig
from ctpo_megatron.data import PromptStream
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines import EngineError, Sampling
from ctpo_megatron.engines.weights import OffersWeights
from ctpo_megatron.rollouts.buffer import OpenBatch, Slot, UniformGroups
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.ledger import Ledger, Quarantined
from ctpo_megatron.rollouts.metrics import rollout_metrics, staleness_metrics
from ctpo_megatron.rollouts.request import Generator, Request
from ctpo_megatron.rollouts.scoring import PendingScoring, Scorer
from ctpo_megatron.rollouts.timeouts import AHEAD_TICK_S, JOIN_TIMEOUT_S, SCORING_TICK_S, TICK_S
from ctpo_megatron.tracking import Phases

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """rollout: the section. steps: of the run. mini_batch_prompts: groups of an optimizer step; a batch holds a whole
    number of mini-batches. by_turn: whether the rewards of turns are trained on (`objective.credit`)."""

    rollout: RolloutConfig
    steps: int
    mini_batch_prompts: int = 1
    by_turn: bool = False

    @classmethod
    def of(cls, config: Config) -> Self:
        """As a run is configured; a recording is read when a batch is requested, never ahead."""
        rollout = config.rollout
        if rollout.replay is not None:
            rollout = rollout.model_copy(update={"max_staleness": 0})
        return cls(rollout, config.run.steps, config.policy.mini_batch_prompts, config.objective.by_turn)


class Rollouts:
    """Scored batches in prompt order, sampled at most `rollout.max_staleness` weight versions behind.

    Lives on rank zero. A context manager that ends its thread. Every prompt that is drawn is trained on, dropped or
    quarantined exactly once (`Ledger`); nothing is thrown away for its age.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        generator: Generator,
        scorer: Scorer,
        prompts: PromptStream,
        stop: Stop,
        phases: Phases,
    ) -> None:
        """stop: checked about every second while sampling. phases: times `rollout` and `reward` of a batch that is
        sampled when it is requested, and hears of every complete group."""
        self._settings, self._config = settings, settings.rollout
        self._generator, self._scorer, self._prompts = generator, scorer, prompts
        self._stop, self._phases = stop, phases
        self._filters, self._ledger = Filters(self._config.filters), Ledger(prompts)
        self._changed = threading.Condition(generator.lock)
        self._open: list[OpenBatch] = []
        self._untold: Batch | None = None
        self._scoring: dict[Slot, tuple[Group, PendingScoring]] = {}
        self._version = 0
        self._next: int | None = None
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._failure: Exception | None = None
        self._closed = False
        self._ticked_at = time.monotonic()

    @property
    def ahead(self) -> int:
        """`rollout.max_staleness`."""
        return self._config.max_staleness

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                log.warning("the rollout thread has not ended after %g s, and is left behind", JOIN_TIMEOUT_S)

    def next_batch(self, step: int) -> Batch | None:
        """The batch of RL step `step`; None when the run is to stop.

        A batch that is sampled now consumes no prompt then. Raises what sampling and scoring raise, AccountingError.
        """
        opened = self._await(step) if self.ahead else self._sample(step)
        if opened is None or opened.batch is None:
            return None
        batch = opened.batch
        metrics = batch.metrics
        metrics["rollout/generate_s"] = opened.seconds
        if self.ahead:
            metrics |= staleness_metrics(batch.trained, self._version)
        with self._held():
            metrics |= {f"rollout/{name}": value for name, value in self._generator.stats().items()}
            metrics["rollout/late_groups"] = float(opened.late_groups)
            metrics |= self._prompts.metrics()
            batch.sampler = self._prompts.state_dict()
            self._untold = batch
        return batch

    def publish(self, trainer: OffersWeights, version: int) -> bool:
        """Sample with the trainer's current weights, which are `version`, from now on.

        Returns at once when the run is to stop: whether they were published. Raises what the thread has raised,
        EngineError when it or a group is late, and as `EnginePool.send`.
        """
        self._tell_rewards()
        if self._stop.is_set():
            return False
        try:
            if self.ahead:
                self._publish_ahead(trainer, version)
            else:
                self._generator.update(trainer, version)
                self._version = version
        except Cancelled as cancelled:
            log.info("weights %d were not published: %s", version, cancelled)
            return False
        return True

    def _tell_rewards(self) -> None:
        """Tell the prompt stream how the batch did that has been trained on since, once."""
        if (batch := self._untold) is None:
            return
        self._untold, rewards = None, dict[str, list[float]]()
        for group in batch.groups:
            rewards.setdefault(group.prompt.id, []).extend(group.verdicts)
        with self._held():
            self._prompts.learn(rewards)

    def _publish_ahead(self, trainer: OffersWeights, version: int) -> None:
        self._generator.wait_ready()
        try:
            if self._config.partial == "finish":
                self._finish_in_flight()
            with self._held():
                self._raise_failure()
                self._generator.update(trainer, version)
                self._version = version
                self._begin_batches()  # after the update: what it adds is to be sampled with the new weights
                self._generator.on_hold = False
                self._generator.submit()
                self._changed.notify_all()
        finally:
            self._generator.on_hold = False  # `_finish_in_flight` sets it, and may raise
        if self._thread.ident is None:
            self._ticked_at = time.monotonic()
            self._thread.start()

    def state_dict(self) -> dict[str, Any]:
        """Position of the prompt stream, quarantined prompts, and the batches that are sampled ahead.

        Raises AccountingError.
        """
        self._tell_rewards()
        with self._held():
            state = {
                "prompts": self._prompts.state_dict(),
                "quarantined": [asdict(record) for record in self._generator.quarantined],
            }
            if not self.ahead:
                return state
            self._check()
            in_flight = self._in_flight()
            batches = [opened.state_dict(in_flight, self._scorer.report_record) for opened in self._open]
            return state | {"ahead": {"shape": self._shape, "settled": self._ledger.state_dict(), "batches": batches}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, before the first `publish`; prompts that were in flight are sampled again.

        Raises ValueError when it is of other prompts, or holds batches that do not fit these settings.
        """
        ahead = state.get("ahead", {})
        batches = ahead.get("batches", [])
        self._check_fits(batches, ahead)
        self._prompts.load_state_dict(state["prompts"])
        self._generator.quarantined[:] = [Quarantined(**record) for record in state["quarantined"]]
        self._open = [self._restored(record) for record in batches]
        self._next = batches[-1]["step"] + 1 if batches else None
        under_way = [*(g.prompt for opened in self._open for g in opened.groups), *self._in_flight().values()]
        settled = ahead.get("settled", {"trained": self._prompts.taken, "dropped": 0, "quarantined": 0})
        self._ledger.load_state_dict(settled, under_way)
        self._check()

    def _check_fits(self, batches: Collection[Any], ahead: Mapping[str, Any]) -> None:
        if batches and not self.ahead:
            raise ValueError(
                f"it holds what was sampled ahead for {len(batches)} batches, and this run samples none "
                "(rollout.max_staleness: 0): continue with the rollout.max_staleness that it was begun with"
            )
        if batches and ahead["shape"] != self._shape:
            raise ValueError(
                "it holds groups that were sampled ahead with rollout.prompts_per_step and samples_per_prompt "
                f"{ahead['shape']}, this run has {self._shape}: give it those that it was begun with"
            )

    def _restored(self, record: Mapping[str, Any]) -> OpenBatch:
        opened = OpenBatch(record["step"], self._uniform(record["refills"]))
        prompts = self._prompts.named({group["prompt"] for group in record["groups"]})
        opened.load_groups(record, prompts, self._scorer.report_of)
        return opened

    @property
    def _shape(self) -> list[int]:
        return [self._config.prompts_per_step, self._config.samples_per_prompt]

    def _uniform(self, refills: int = 0) -> UniformGroups:
        settings = self._settings
        return UniformGroups(settings.rollout, settings.mini_batch_prompts, refills, by_turn=settings.by_turn)

    # A batch that is sampled when it is requested, in the caller's thread.

    def _sample(self, step: int) -> OpenBatch | None:
        before = self._prompts.state_dict(), self._ledger.state_dict()
        opened = OpenBatch(step, self._uniform())
        self._open = [opened]
        try:
            self._generator.wait_ready()
            with self._held():
                self._draw(opened, self._config.prompts_per_step + self._config.oversample)
            while opened.batch is None:
                with self._phases.phase("rollout"):
                    while self._generator.pending and len(self._scoring) + len(opened.scored) < self._wanted(opened):
                        if self._stop.is_set():
                            raise Cancelled(f"stop requested while {len(self._generator.pending)} groups were sampled")
                        self._tick(TICK_S)
                with self._phases.phase("reward"):
                    self._complete_scored(opened)
        except Cancelled:
            self._withdraw(*before)
            return None
        finally:
            self._generator.cancel()
            self._scoring.clear()
            self._open = []
        self._ledger.deliver(opened.batch)
        self._check()
        return opened

    def _withdraw(self, prompts: Mapping[str, Any], settled: Mapping[str, int]) -> None:
        """Nothing of the batch has happened."""
        self._prompts.load_state_dict(prompts)
        self._ledger.load_state_dict(settled, [])

    def _complete_scored(self, opened: OpenBatch) -> None:
        with self._held():
            self._discard(opened, self._generator.pending)
        for slot, (group, pending) in self._scoring.items():
            opened.add(slot[1], group, pending.result())
        self._scoring.clear()
        with self._held():
            self._complete(opened)

    # Batches that are sampled ahead: the caller waits for the thread.

    def _await(self, step: int) -> OpenBatch | None:
        """The complete batch of a step; None: the run is to stop.

        Every group has its deadline (`rollout.group_timeout_s`) and its number of retries, which bounds the wait while
        the thread ticks. Raises EngineError when it does not.
        """
        while not self._stop.is_set():
            with self._held():
                self._raise_failure()  # first: a thread that has failed is late as well
                self._check_thread(step)
                opened = next(iter(self._open), None)
                if opened is not None and opened.batch is not None:
                    if opened.step != step:
                        raise RuntimeError(f"step {step} asks for its batch, the next one is of step {opened.step}")
                    del self._open[0]
                    self._ledger.deliver(opened.batch)
                    self._check()
                    return opened
                self._changed.wait(STOP_POLL_S)
        return None

    def _check_thread(self, step: int) -> None:
        if time.monotonic() > self._ticked_at + self._patience_s:
            pending = f"{len(self._generator.pending)} groups to sample, {len(self._scoring)} to score"
            late = f"has not ended its tick within {self._patience_s:g} s"
            raise EngineError(f"step {step} waits for the rollout thread, which {late}; it has {pending}")

    def _finish_in_flight(self) -> None:
        """Submit nothing more, and return when no group is in flight. Raises Cancelled."""
        deadline = time.monotonic() + self._config.group_timeout_s + JOIN_TIMEOUT_S
        with self._held():
            self._generator.on_hold = True
            while self._generator.in_flight:
                self._raise_failure()
                if self._stop.is_set():
                    raise Cancelled(f"stop requested while {self._generator.in_flight} groups were in flight")
                if time.monotonic() > deadline:
                    late = f"{self._generator.in_flight} groups neither end nor expire (rollout.group_timeout_s)"
                    raise EngineError(f"the weights wait for what is in flight (rollout.partial: finish): {late}")
                self._changed.wait(STOP_POLL_S)

    def _work(self) -> None:
        try:
            while self._tick_ahead():
                pass
        except Exception as error:  # whatever it is, the caller that waits for a batch raises it
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._generator.cancel()

    def _tick_ahead(self) -> bool:
        """Sample, score and complete what there is; False once it is closed."""
        with self._changed:
            if not self._closed and not self._generator.pending and not self._scoring:
                self._changed.wait(STOP_POLL_S)
        if self._closed:
            return False
        self._tick(SCORING_TICK_S if self._scoring else AHEAD_TICK_S)
        with self._changed:
            self._ticked_at = time.monotonic()
            self._take_scores()
            for opened in self._open:
                if opened.batch is None and len(opened.scored) >= self._wanted(opened):
                    self._discard(opened, self._in_flight())
                    self._complete(opened)
            self._changed.notify_all()
        return True

    @property
    def _patience_s(self) -> float:
        """Longest tick of the thread: an engine that is replaced in it starts and is given weights."""
        return self._config.start_timeout_s + self._config.weights.timeout_s

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _held(self) -> Iterator[None]:
        # With a deadline: a thread that stands still with the lock would stop the trainer without a message.
        if not self._changed.acquire(timeout=self._patience_s):
            raise EngineError(f"the rollout thread has not released the engines for {self._patience_s:g} s")
        try:
            yield
        finally:
            self._changed.release()

    # Both ways. `_tick` takes the lock itself; the others are called while it is held.

    def _tick(self, timeout_s: float) -> None:
        """Sample for a while, and begin to score the groups that are complete."""
        self._generator.wait(timeout_s)
        with self._held():
            by_step = {opened.step: opened for opened in self._open}
            for slot, group in self._generator.collect().groups:
                self._phases.advance()
                by_step[slot[0]].note_sampled()
                self._scoring[slot] = (group, self._scorer.begin([group]))

    def _begin_batches(self) -> None:
        """Begin the batches that the current version permits."""
        for opened in self._open:
            for index, prompt in opened.waiting.items():
                self._generator.add((opened.step, index), prompt, self._request(opened, index))
            opened.waiting.clear()
        self._next = self._next or self._version  # the first step trains the version that is published first
        while self._next <= min(self._settings.steps, self._version + self.ahead):
            opened = OpenBatch(self._next, self._uniform())
            self._open.append(opened)
            self._draw(opened, self._config.prompts_per_step + self._config.oversample)
            self._next += 1

    def _draw(self, opened: OpenBatch, count: int) -> None:
        for prompt in self._ledger.take(count):
            index, opened.drawn = opened.drawn, opened.drawn + 1
            self._generator.add((opened.step, index), prompt, self._request(opened, index))

    def _request(self, opened: OpenBatch, index: int) -> Request:
        config = self._config
        sampling = Sampling(config.temperature, config.top_p, config.top_k)
        replacements, occurrence = self._ledger.replacements(), partial(opened.occurrence, index)
        return Request(opened.step, config.samples_per_prompt, sampling, replacements, occurrence)

    def _take_scores(self) -> None:
        by_step = {opened.step: opened for opened in self._open}
        for step, index in [slot for slot, (_, pending) in self._scoring.items() if pending.done]:
            group, pending = self._scoring.pop((step, index))
            by_step[step].add(index, group, pending.result())

    def _wanted(self, opened: OpenBatch) -> int:
        """Groups that complete a batch. A resumed run may have drawn more by other settings before."""
        refilled = self._config.uniform_groups == "refill" and opened.uniform.refills > 0
        return opened.drawn if refilled else self._config.prompts_per_step

    def _discard(self, opened: OpenBatch, unfinished: Mapping[Slot, Prompt]) -> None:
        """The batch is complete without these groups, and without those that were scored last."""
        late = {slot: prompt for slot, prompt in unfinished.items() if slot[0] == opened.step}
        self._generator.discard(late)
        for slot in late:
            self._scoring.pop(slot, None)
        opened.late += list(late.values())

    def _complete(self, opened: OpenBatch) -> None:
        """No group of the batch is under way: draw further prompts, or make what the trainer takes."""
        discarded = [*opened.late, *opened.keep_first(self._wanted(opened))]
        opened.late = []
        opened.late_groups += len(discarded)
        self._ledger.discard(discarded)
        if missing := opened.uniform.missing(opened.groups):
            self._draw(opened, missing)
            return
        groups = opened.groups
        metrics = rollout_metrics(groups) | self._scorer.metrics(groups, opened.ordered_reports)
        opened.batch = opened.assemble(metrics, self._filters)

    def _in_flight(self) -> dict[Slot, Prompt]:
        """Prompts whose groups are queued, sampled or scored."""
        slots = {(opened.step, index): prompt for opened in self._open for index, prompt in opened.waiting.items()}
        scoring = {slot: group.prompt for slot, (group, _) in self._scoring.items()}
        return slots | dict(self._generator.pending) | scoring

    def _check(self) -> None:
        """Every prompt that was consumed is accounted for."""
        buffered = [group.prompt.id for opened in self._open for group in opened.groups]
        in_flight = [prompt.id for prompt in self._in_flight().values()]
        self._ledger.check(buffered, in_flight, {record.prompt_id for record in self._generator.quarantined})
