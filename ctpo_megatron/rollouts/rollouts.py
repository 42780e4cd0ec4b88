"""Training batches: prompts are drawn, sampled, scored and filtered, in the order of the data, ahead or not.

A group is one coroutine from its prompt to its rewards, a batch a task that waits for its groups. `max_staleness` is
the one difference: a batch is begun when it is requested, or as soon as a version that it may be sampled with is
published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ctpo_megatron.base.event_loop import EventLoop, end
from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.config import Config, RolloutConfig
from ctpo_megatron.data import PromptStream
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling
from ctpo_megatron.engines.weights import OffersWeights
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.group_sampler import GroupSampler
from ctpo_megatron.rollouts.metrics import rollout_metrics, staleness_metrics
from ctpo_megatron.rollouts.open_batch import OpenBatch, UniformGroups
from ctpo_megatron.rollouts.quarantine import Quarantined
from ctpo_megatron.rollouts.scoring import Scorer
from ctpo_megatron.tracking import Phases

log = logging.getLogger(__name__)

SETTLED = ("trained", "dropped", "quarantined")
"""What becomes of every prompt that is drawn."""
_SHOWN = 5


class AccountingError(RuntimeError):
    """Prompts are lost or there twice; the message has all numbers. It is a bug of ctpo-megatron."""


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
            rollout = rollout.model_copy(update={"max_staleness": 0, "lag": 0})
        return cls(rollout, config.run.steps, config.policy.mini_batch_prompts, config.objective.by_turn)


class Rollouts:
    """Scored batches in prompt order, sampled at most `rollout.max_staleness` weight versions behind.

    Lives on rank zero. A context manager that ends what is sampled. Every prompt that is drawn is trained on, dropped
    or quarantined exactly once: taken = settled + drawn in open batches. Nothing is thrown away for its age.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        loop: EventLoop,
        sampler: GroupSampler,
        scorer: Scorer,
        prompts: PromptStream,
        stop: Stop,
        phases: Phases,
    ) -> None:
        """stop: checked about every second while sampling. phases: times `rollout` and `reward` of a batch that is
        sampled when it is requested, and hears of every complete group."""
        self._settings, self._config = settings, settings.rollout
        self._loop, self._sampler, self._scorer, self._prompts = loop, sampler, scorer, prompts
        self._stop, self._phases = stop, phases
        self._filters = Filters(self._config.filters)
        self._settled = Counter(dict.fromkeys(SETTLED, 0))
        self._open: list[OpenBatch] = []
        self._untold: Batch | None = None
        self._version = 0
        self._next: int | None = None

    @property
    def ahead(self) -> int:
        """Steps that are sampled before they are trained: `rollout.max_staleness`, or `rollout.lag`."""
        return self._config.ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(self._end())

    # The trainer's thread.

    def next_batch(self, step: int) -> Batch | None:
        """The batch of RL step `step`; None when the run is to stop.

        A batch that is sampled now consumes no prompt then. Raises what sampling and scoring raise, AccountingError.
        """
        try:
            opened = self._await_ahead(step) if self.ahead else self._sample_now(step)
        except Cancelled as cancelled:
            log.info("step %d: no batch: %s", step, cancelled)
            return None
        return self._loop.do(lambda: self._delivered(opened))

    def publish(self, trainer: OffersWeights, version: int) -> bool:
        """Sample with the trainer's current weights, which are `version`, from now on.

        Returns at once when the run is to stop: whether they were published. Raises what sampling ahead has raised,
        and as `EnginePool.send`.
        """
        self._loop.do(self._tell_rewards)
        if self._stop.is_set():
            return False
        try:
            if self.ahead:
                self._sampler.engines.wait_ready()
            if self._config.lag:  # what is open is of earlier weights, all of it
                self._loop.call(self._completed(), self._stop)
            self._loop.call(self._hold(), self._stop)
            self._sampler.engines.send(trainer, version)
            self._loop.do(lambda: self._published(version))
        except Cancelled as cancelled:
            log.info("weights %d were not published: %s", version, cancelled)
            return False
        finally:
            self._loop.do(self._sampler.resume)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Position of the prompt stream, quarantined prompts, and the batches that are sampled ahead.

        With `rollout.lag` it waits for the groups that are sampled: a resumed run does not have the weights for them.
        Raises AccountingError.
        """
        if self._config.lag:
            self._loop.call(self._completed())
        return self._loop.do(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, before the first `publish`; prompts that were in flight are sampled again.

        Raises ValueError when it is of other prompts, or holds batches that do not fit these settings.
        """
        ahead = state.get("ahead", {})
        batches = ahead.get("batches", [])
        self._check_fits(batches, ahead)
        self._prompts.load_state_dict(state["prompts"])
        self._sampler.quarantine.records[:] = [Quarantined(**record) for record in state["quarantined"]]
        self._open = [self._restored(record) for record in batches]
        self._next = batches[-1]["step"] + 1 if batches else None
        self._settled = Counter(ahead.get("settled") or {"trained": self._prompts.taken})
        self._check()

    def _await_ahead(self, step: int) -> OpenBatch:
        if self._stop.is_set():
            raise Cancelled("stop requested")
        if not self._open or self._open[0].step != step:
            steps = [opened.step for opened in self._open]
            raise RuntimeError(f"step {step} asks for its batch, and the steps {steps} are sampled")
        opened = self._open[0]

        async def complete() -> None:
            assert opened.batch is not None
            await asyncio.shield(opened.batch)

        self._loop.call(complete(), self._stop)
        return opened

    def _sample_now(self, step: int) -> OpenBatch:
        """A batch that is sampled when it is requested; nothing of it has happened where it is cancelled."""
        before = self._loop.do(lambda: (self._prompts.state_dict(), Counter(self._settled)))
        self._sampler.engines.wait_ready()
        opened = self._loop.do(lambda: self._begin(step))
        try:
            while not opened.done:
                with self._phases.phase("rollout"):
                    self._loop.call(_until(opened, sampling=True), self._stop)
                with self._phases.phase("reward"):  # what is sampled is scored and trained on, also by a run that stops
                    self._loop.call(_until(opened, sampling=False))
            self._loop.do(opened.result)
        except BaseException as error:
            self._loop.call(self._end())
            self._open = []
            if isinstance(error, Cancelled):
                self._prompts.load_state_dict(before[0])
                self._settled = before[1]
            raise
        return opened

    # On the loop.

    def _begin(self, step: int) -> OpenBatch:
        opened = OpenBatch(step, self._uniform())
        # With a lag the prompts of a batch follow from the batches before it, whatever the timing.
        before = self._open[-1].batch if self._config.lag and self._open else None
        self._open.append(opened)
        opened.batch = asyncio.create_task(self._collected(opened, before))
        return opened

    async def _completed(self) -> None:
        """Wait for all batches that are open."""
        for batch in [opened.batch for opened in self._open]:
            if batch is not None:
                await asyncio.shield(batch)

    async def _hold(self) -> None:
        """Let no group begin, and with `partial: finish` wait for those in flight."""
        for opened in self._open:
            if opened.done:
                opened.result()  # may raise
        self._sampler.on_hold = True
        if self._config.partial == "finish":
            await self._sampler.drain()

    def _published(self, version: int) -> None:
        self._version = version
        if not self.ahead:
            return
        for opened in self._open:
            if opened.batch is None:  # of a checkpoint
                opened.batch = asyncio.create_task(self._collected(opened))
        self._next = self._next or version  # the first step trains the version that is published first
        while self._next <= min(self._settings.steps, version + self.ahead):
            self._begin(self._next)
            self._next += 1

    def _delivered(self, opened: OpenBatch) -> Batch:
        batch = opened.result()
        self._open.remove(opened)
        self._settled.update("dropped" if group.dropped else "trained" for group in batch.groups)
        self._check()
        metrics = batch.metrics
        metrics["rollout/generate_s"] = opened.seconds
        if self.ahead:
            metrics |= staleness_metrics(batch.trained, self._version)
        metrics |= {f"rollout/{name}": value for name, value in self._sampler.engines.stats().items()}
        metrics["rollout/late_groups"] = float(opened.late)
        metrics |= self._prompts.metrics()
        batch.sampler = self._prompts.state_dict()
        self._untold = batch
        return batch

    def _tell_rewards(self) -> None:
        """Tell the prompt stream how the batch did that has been trained on since, once."""
        if (batch := self._untold) is None:
            return
        self._untold, rewards = None, dict[str, list[float]]()
        for group in batch.groups:
            rewards.setdefault(group.prompt.id, []).extend(group.verdicts)
        self._prompts.learn(rewards)

    async def _collected(self, opened: OpenBatch, before: asyncio.Task[Batch] | None = None) -> Batch:
        """Sample a batch, or what a checkpoint lacks of it: the first groups that are wanted, and refills for uniform
        ones. before: the batch to wait for."""
        running = set[asyncio.Task[None]]()
        try:
            if before is not None:
                await asyncio.wait({before})
            if opened.drawn:
                numbers = [number for number in range(len(opened.drawn)) if number not in opened.groups]
            else:
                numbers = self._draw(opened, self._config.prompts_per_step + self._config.oversample)
            running = self._started(opened, numbers)
            # A resumed run may have drawn more by other settings before.
            refilled = self._config.uniform_groups == "refill" and opened.uniform.refills > 0
            wanted = len(opened.drawn) if refilled else self._config.prompts_per_step
            while True:
                while running and len(opened.groups) < wanted:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in [each for each in running if each.done()]:
                        task.result()
                        running.discard(task)
                await end(running)
                self._settled["dropped"] += opened.keep_first(wanted)
                if not (missing := opened.uniform.missing(opened.complete)):
                    return self._assembled(opened)
                running = self._started(opened, self._draw(opened, missing))
                wanted = len(opened.drawn)
        finally:
            await end(running)
            opened.changed.set()

    def _draw(self, opened: OpenBatch, count: int) -> list[int]:
        first = len(opened.drawn)
        opened.drawn += self._prompts.take(count)
        return list(range(first, len(opened.drawn)))

    def _started(self, opened: OpenBatch, numbers: Collection[int]) -> set[asyncio.Task[None]]:
        for number in numbers:
            self._replace_lost(opened, number)
            opened.occurrence(number)
        opened.note(len(numbers))
        return {asyncio.create_task(self._group(opened, number)) for number in numbers}

    async def _group(self, opened: OpenBatch, number: int) -> None:
        """One draw of a batch from its prompt to its rewards; a prompt that fails too often is replaced."""
        try:
            while (trajectories := await self._sampled(opened, number)) is None:
                self._replace_lost(opened, number)
        finally:
            opened.note(-1)
        self._phases.advance()
        group = Group(opened.drawn[number], trajectories)
        opened.add(number, group, await self._scorer.score([group]))

    async def _sampled(self, opened: OpenBatch, number: int) -> list[Trajectory] | None:
        """The trajectories of a draw; None: its prompt is in quarantine now."""
        config, prompt = self._config, opened.drawn[number]
        sampling = Sampling(config.temperature, config.top_p, config.top_k)
        samples = tuple(range(config.samples_per_prompt))
        task = GroupTask(prompt, opened.step, samples, sampling, occurrence=opened.occurrence(number))
        try:
            return await self._sampler.sample(task)
        except GroupFailed as error:
            self._sampler.lose(prompt, opened.step, error)
            return None

    def _replace_lost(self, opened: OpenBatch, number: int) -> None:
        prompt, drawn = self._sampler.quarantine.replace(opened.drawn[number], lambda: self._prompts.take(1)[0])
        if drawn:
            self._settled["quarantined"] += drawn
            opened.replace(number, prompt)

    def _assembled(self, opened: OpenBatch) -> Batch:
        groups = opened.complete
        reports = [opened.reports[number] for number in sorted(opened.reports)]
        return opened.assemble(rollout_metrics(groups) | self._scorer.metrics(groups, reports), self._filters)

    def _uniform(self, refills: int = 0) -> UniformGroups:
        settings = self._settings
        return UniformGroups(settings.rollout, settings.mini_batch_prompts, refills, by_turn=settings.by_turn)

    async def _end(self) -> None:
        await end({opened.batch for opened in self._open if opened.batch is not None})

    # Checkpoints and accounting.

    def _state(self) -> dict[str, Any]:
        self._tell_rewards()
        state = {
            "prompts": self._prompts.state_dict(),
            "quarantined": [asdict(record) for record in self._sampler.quarantine.records],
        }
        if not self.ahead:
            return state
        self._check()
        batches = [opened.state_dict(self._scorer.report_record) for opened in self._open]
        return state | {"ahead": {"shape": self._shape, "settled": dict(self._settled), "batches": batches}}

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

    def _check(self) -> None:
        """Every prompt that was taken is settled or in an open batch."""
        drawn = [prompt.id for opened in self._open for prompt in opened.drawn]
        there = self._settled.total() + len(drawn)
        if there != self._prompts.taken:
            sides = " + ".join(f"{count} {name}" for name, count in self._settled.items())
            raise AccountingError(
                f"{self._prompts.taken} prompts were consumed, but {sides} + {len(drawn)} in open batches = {there}; "
                f"open: {drawn[:_SHOWN]}{'...' * (len(drawn) > _SHOWN)}: please report it, with the log"
            )


async def _until(opened: OpenBatch, *, sampling: bool) -> None:
    """Return when groups of the batch have ended to be sampled, or scored, or it is complete."""
    while bool(opened.sampling) is sampling and not opened.done:
        opened.changed.clear()
        await opened.changed.wait()
