"""Training batches: prompts are drawn, sampled, scored and filtered, in the order of the data, ahead or not.

A group is one coroutine from its prompt to its rewards, a batch a task that waits for its groups. It is begun when it
is requested or, with `max_staleness`, as soon as a version that it may be sampled with is published.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from ctpo_megatron.base.event_loop import EventLoop, end
from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data import Batch, Group, Prompt, PromptStream
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling
from ctpo_megatron.engines.weights import SendsWeights
from ctpo_megatron.rewards import Scorer, ScoreReport
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.group_sampler import GroupSampler, Quarantined, TooManyQuarantined
from ctpo_megatron.rollouts.metrics import engine_metrics, rollout_metrics, staleness_metrics
from ctpo_megatron.tracking import Phases

log = logging.getLogger(__name__)

SETTLED = ("trained", "dropped", "quarantined")
"""What becomes of every prompt that is drawn."""
_SHOWN = 5
_DRAWS = 1000
"""In a row for each quarantined prompt; any data but a mix, of a file that has no others, needs fewer."""


class AccountingError(RuntimeError):
    """Prompts are lost or there twice; the message has all numbers. It is a bug of ctpo-megatron."""


@dataclass(eq=False, slots=True)
class Draw:
    """A prompt of a batch. occurrence: how often its step had drawn it before. group, report: once it is scored."""

    prompt: Prompt
    occurrence: int | None = None
    group: Group | None = None
    report: ScoreReport | None = None


class OpenBatch:
    """The groups of one step from the draw of their prompts until the trainer takes them.

    mini_batch_prompts: groups of one optimizer step. by_turn: whether the rewards of turns are trained on. draws: in
    the order of the data; scored: those with a group, in the order of scoring. sampling: groups that are not sampled
    yet; changed: set when that has changed. late: groups that were not waited for. refills: rounds for uniform groups.
    seconds: sampling took. batch: what the trainer gets; None: sampling has not begun, as after a resume.
    """

    def __init__(self, step: int, config: RolloutConfig, mini_batch_prompts: int, *, by_turn: bool = False) -> None:
        self.step, self._config, self._mini, self._by_turn = step, config, mini_batch_prompts, by_turn
        self.draws, self.scored = list[Draw](), list[Draw]()
        self.sampling = self.late = self.refills = 0
        self.changed = asyncio.Event()
        self.batch: asyncio.Task[Batch] | None = None
        self._counts: Counter[str] = Counter()
        self._began, self.seconds = time.monotonic(), 0.0

    def occurrence(self, draw: Draw) -> int:
        """Return the occurrence of a draw, fixed when it is first asked for. A discarded group keeps the one that it
        had.
        """
        if draw.occurrence is None:
            draw.occurrence = self._counts[draw.prompt.id]
            self._counts[draw.prompt.id] += 1
        return draw.occurrence

    @property
    def done(self) -> bool:
        """Whether the batch is complete, or has failed."""
        return self.batch is not None and self.batch.done()

    def note(self, change: int) -> None:
        """More groups, or fewer, are being sampled."""
        self.sampling += change
        if change < 0:
            self.seconds = time.monotonic() - self._began
        self.changed.set()

    async def until(self, *, sampling: bool) -> None:
        """Return when groups have begun to be sampled, or all of them have ended, or the batch is done."""
        while bool(self.sampling) is not sampling and not self.done:
            self.changed.clear()
            await self.changed.wait()

    def add(self, draw: Draw, group: Group, report: ScoreReport) -> None:
        """Take the scored group of a draw."""
        draw.group, draw.report = group, report
        self.scored.append(draw)

    def keep_first(self, count: int) -> int:
        """Keep the groups that were scored first, in the order of the draw; returns how many draws are dropped."""
        kept, drawn = set(self.scored[:count]), len(self.draws)
        self.draws = [draw for draw in self.draws if draw in kept]
        self.scored = list(self.draws)
        self.late += drawn - len(kept)
        return drawn - len(kept)

    @property
    def complete(self) -> list[Group]:
        """The groups that are scored, in the order of the draw."""
        return [draw.group for draw in self.draws if draw.group is not None]

    def missing(self, groups: Sequence[Group]) -> int:
        """Return how many prompts to draw for another round of refills, given all scored groups; 0: the batch is
        complete.
        """
        if self._config.uniform_groups != "refill" or self.refills == self._config.max_refills:
            return 0
        missing = self._config.prompts_per_step - sum(group.is_mixed(by_turn=self._by_turn) for group in groups)
        self.refills += missing > 0
        return missing

    def assemble(self, scorer: Scorer, filters: Filters) -> Batch:
        """Return the batch of the complete groups. Some groups are dropped, loss masks are written."""
        groups = self.complete
        reports = [draw.report for draw in self.draws if draw.report is not None]
        batch = Batch(groups, rollout_metrics(groups) | scorer.metrics(groups, reports))
        batch.metrics["rollout/prompts_repeated"] = float(len(groups) - len({group.prompt.id for group in groups}))
        if self._config.uniform_groups != "keep":
            batch.metrics |= self._drop_uniform(groups)
        batch.metrics |= filters.apply(batch.trained)
        versions = set[int]().union(*(np.unique(t.tokens["weight_version"]).tolist() for t in batch.trajectories))
        batch.weight_versions = tuple(sorted(version for version in versions if version >= 0))
        return batch

    def _drop_uniform(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mark groups whose rewards are all equal as dropped, but the last ones that fill the last optimizer step; at
        least one is made. Groups without verdicts to compare are the first to leave."""
        uniform = [group for group in groups if not group.is_mixed(by_turn=self._by_turn)]
        steps = max(1, math.ceil((len(groups) - len(uniform)) / self._mini))
        for group in sorted(uniform, key=lambda group: not group.unjudged)[: len(groups) - steps * self._mini]:
            group.dropped = True
        dropped = float(sum(group.dropped for group in groups))
        metrics = {"rollout/groups_uniform": len(uniform) / len(groups), "rollout/groups_dropped": dropped}
        return metrics | ({"rollout/refills": float(self.refills)} if self._config.uniform_groups == "refill" else {})

    def state_dict(self) -> dict[str, Any]:
        """As a checkpoint keeps it: scored groups whole, of others the prompt. All is JSON but the trajectories."""
        records: list[dict[str, Any]] = []
        for draw in self.draws:
            records.append({"prompt": draw.prompt.id, "occurrence": self.occurrence(draw)})
            if draw.group is not None and draw.report is not None:
                kept = [copy.copy(trajectory) for trajectory in draw.group.trajectories]  # filters will set masks
                records[-1] |= {"trajectories": kept, "report": asdict(draw.report)}
        return {"step": self.step, "refills": self.refills, "draws": dict(self._counts), "groups": records}

    def load_state_dict(self, state: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> None:
        """Continue from a `state_dict` of this step. prompts: those that it names, by id."""
        self._counts, self.refills = Counter(state["draws"]), state["refills"]
        for record in state["groups"]:
            draw = Draw(prompts[record["prompt"]], record["occurrence"])
            self.draws.append(draw)
            if "trajectories" in record:
                self.add(draw, Group(draw.prompt, list(record["trajectories"])), ScoreReport(**record["report"]))


class Rollouts:
    """Scored batches in prompt order, sampled at most `rollout.max_staleness` weight versions behind.

    Lives on rank zero. A context manager that ends what is sampled. Every prompt that is drawn is trained on, dropped
    or quarantined exactly once: taken = settled + drawn in open batches. Nothing is thrown away for its age.
    """

    def __init__(
        self,
        config: RolloutConfig,
        loop: EventLoop,
        sampler: GroupSampler,
        scorer: Scorer,
        prompts: PromptStream,
        stop: Stop,
        phases: Phases,
        *,
        steps: int,
        mini_batch_prompts: int = 1,
        by_turn: bool = False,
    ) -> None:
        """stop: checked about every second while sampling. phases: times `rollout` and `reward` of a batch that is
        sampled when it is requested, and hears of every complete group. steps: of the run. mini_batch_prompts: groups
        of an optimizer step, of which a batch holds a whole number. by_turn: whether the rewards of turns are trained
        on (`objective.credit`)."""
        self._config, self._steps, self._mini, self._by_turn = config, steps, mini_batch_prompts, by_turn
        self._ahead = 0 if config.replay is not None else config.ahead  # a recording is read when a batch is requested
        self._loop, self._sampler, self._scorer, self._prompts = loop, sampler, scorer, prompts
        self._stop, self._phases = stop, phases
        self._shape = [self._config.prompts_per_step, self._config.samples_per_prompt]
        self._filters = Filters(self._config.filters)
        self._settled = Counter(dict.fromkeys(SETTLED, 0))
        self._open: list[OpenBatch] = []
        self._untold: dict[str, list[float]] = {}  # rewards that the sampler of the prompts has to learn
        self._version = 0
        self._next: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call(end(self._batches))

    # The trainer's thread.

    def next_batch(self, step: int) -> Batch | None:
        """Return the batch of RL step `step`; None when the run is to stop, and one that is sampled now consumes no
        prompt.

        Raises what sampling and scoring raise, and AccountingError.
        """
        try:
            if self._stop.is_set():
                raise Cancelled("stop requested")
            if self._ahead:
                assert self._open[0].step == step
                self._loop.call(self._completed(1), self._stop)
            else:
                self._sample_now(step)
        except Cancelled as cancelled:
            log.info("step %d: no batch: %s", step, cancelled)
            return None
        return self._loop.do(self._delivered)

    def publish(self, trainer: SendsWeights, version: int) -> bool:
        """Sample with the trainer's current weights, which are `version`, from now on.

        Returns whether they were published: not when the run is to stop. Raises what sampling ahead has raised, and as
        `EnginePool.send`.
        """
        if self._stop.is_set():
            return False
        try:
            if self._ahead:
                self._sampler.engines.wait_ready()
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
        if batches and not self._ahead:
            raise ValueError(
                f"it holds what was sampled ahead for {len(batches)} batches, and this run samples none "
                "(rollout.max_staleness: 0): continue with the rollout.max_staleness that it was begun with"
            )
        if batches and ahead["shape"] != self._shape:
            raise ValueError(
                "it holds groups that were sampled ahead with rollout.prompts_per_step and samples_per_prompt "
                f"{ahead['shape']}, this run has {self._shape}: give it those that it was begun with"
            )
        self._prompts.load_state_dict(state["prompts"])
        self._sampler.quarantined[:] = [Quarantined(**record) for record in state["quarantined"]]
        for record in batches:
            prompts = self._prompts.named({group["prompt"] for group in record["groups"]})
            self._open.append(self._new(record["step"]))
            self._open[-1].load_state_dict(record, prompts)
            self._next = record["step"] + 1
        self._settled = Counter(ahead.get("settled") or {"trained": self._prompts.taken})
        self._check()

    def _sample_now(self, step: int) -> None:
        """A batch that is sampled when it is requested; nothing of it has happened where it is cancelled."""
        before = self._loop.do(lambda: (self._prompts.state_dict(), Counter(self._settled)))
        self._sampler.engines.wait_ready()
        opened = self._loop.do(lambda: self._begin(step)[-1])
        try:
            while not opened.done:
                with self._phases.phase("rollout"):
                    self._loop.call(opened.until(sampling=False), self._stop)
                with self._phases.phase("reward"):  # what is sampled is scored and trained on, also by a run that stops
                    self._loop.call(opened.until(sampling=True))
            self._loop.call(self._completed())
        except BaseException as error:
            self._loop.call(end(self._batches))
            self._open = []
            if isinstance(error, Cancelled):
                self._prompts.load_state_dict(before[0])
                self._settled = before[1]
            raise

    # On the loop.

    def _begin(self, *steps: int) -> list[OpenBatch]:
        """Open the batches of further steps, and sample all that are not sampled yet; returns the open ones."""
        self._open += map(self._new, steps)
        before = None
        for opened in self._open:
            opened.batch = opened.batch or asyncio.create_task(self._collected(opened, before))
            # With a lag the prompts of a batch follow from the batches before it, whatever the timing.
            before = opened.batch if self._config.lag else None
        return self._open

    def _new(self, step: int) -> OpenBatch:
        return OpenBatch(step, self._config, self._mini, by_turn=self._by_turn)

    @property
    def _batches(self) -> list[asyncio.Task[Batch]]:
        """The open batches that are sampled; one of a checkpoint is not before the first `publish`."""
        return [opened.batch for opened in self._open if opened.batch is not None]

    async def _completed(self, count: int | None = None) -> None:
        """Wait for the first `count` open batches, or all. Raises what has failed."""
        for batch in self._batches[:count]:
            await asyncio.shield(batch)

    async def _hold(self) -> None:
        """Let no group begin, and with `partial: finish` wait for those in flight; with a lag complete all batches,
        which are of earlier weights."""
        if self._config.lag:
            await self._completed()
        for batch in self._batches:
            if batch.done():
                batch.result()  # may raise
        self._sampler.on_hold = True
        if self._config.partial == "finish":
            await self._sampler.drain()

    def _published(self, version: int) -> None:
        self._version = version
        self._tell()
        if self._ahead:
            first = self._next or version  # the first step trains the version that is published first
            self._next = max(first, min(self._steps, version + self._ahead) + 1)
            self._begin(*range(first, self._next))

    def _delivered(self) -> Batch:
        opened = self._open.pop(0)
        assert opened.batch is not None
        batch = opened.batch.result()
        self._settled.update("dropped" if group.dropped else "trained" for group in batch.groups)
        self._check()
        if self._ahead:
            batch.metrics |= staleness_metrics(batch.trained, self._version)
        batch.metrics |= engine_metrics(self._sampler.engines.stats())
        batch.metrics |= {"rollout/generate_s": opened.seconds, "rollout/late_groups": float(opened.late)}
        batch.metrics |= self._prompts.metrics()
        for group in batch.groups:
            self._untold.setdefault(group.prompt.id, []).extend(group.verdicts)
        if not self._config.lag:
            self._tell()
        return batch

    def _tell(self) -> None:
        """Have the sampler of the prompts learn the rewards of the last batch that was delivered.

        With a lag while no open batch draws: else the refills of one would depend on when the trainer got another.
        """
        rewards, self._untold = self._untold, {}
        if rewards:
            self._prompts.learn(rewards)

    async def _collected(self, opened: OpenBatch, before: asyncio.Task[Batch] | None = None) -> Batch:
        """Sample a batch, or what a checkpoint lacks of it: the first groups that are wanted, and refills for uniform
        ones. before: the batch to wait for."""
        config, running = self._config, set[asyncio.Task[None]]()
        try:
            if before is not None:
                await asyncio.wait({before})
            # A resumed run may have drawn more by other settings before.
            refilled = config.uniform_groups == "refill" and opened.refills > 0
            wanted = len(opened.draws) if refilled else config.prompts_per_step
            if not opened.draws:
                opened.draws += map(Draw, self._prompts.take(config.prompts_per_step + config.oversample))
            while True:
                lacking = [draw for draw in opened.draws if draw.group is None]
                opened.note(len(lacking))
                running = {asyncio.create_task(self._group(opened, draw)) for draw in lacking}
                while running and len(opened.scored) < wanted:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in [each for each in running if each.done()]:
                        task.result()
                        running.discard(task)
                await end(running)
                self._settled["dropped"] += opened.keep_first(wanted)
                if not (missing := opened.missing(opened.complete)):
                    return opened.assemble(self._scorer, self._filters)
                opened.draws += map(Draw, self._prompts.take(missing))
                wanted = len(opened.draws)
        finally:
            await end(running)
            opened.changed.set()

    async def _group(self, opened: OpenBatch, draw: Draw) -> None:
        """One draw of a batch from its prompt to its rewards; a prompt that fails too often is replaced."""
        config, trajectories = self._config, None
        sampling = Sampling(config.temperature, config.top_p, config.top_k)
        try:
            while trajectories is None:
                self._replace_lost(draw)
                samples, occurrence = tuple(range(config.samples_per_prompt)), opened.occurrence(draw)
                try:
                    task = GroupTask(draw.prompt, opened.step, samples, sampling, occurrence=occurrence)
                    trajectories = await self._sampler.sample(task)
                except GroupFailed as error:
                    self._sampler.lose(draw.prompt, opened.step, error)
        finally:
            opened.note(-1)
        self._phases.advance()
        group = Group(draw.prompt, trajectories)
        opened.add(draw, group, await self._scorer.score([group]))

    def _replace_lost(self, draw: Draw) -> None:
        """Give a draw the next prompt that is not in quarantine. Raises TooManyQuarantined where none seems to come."""
        limit = _DRAWS * (len(self._sampler.quarantined) + 1)
        for _ in range(limit):
            if not self._sampler.is_quarantined(draw.prompt):
                return
            self._settled["quarantined"] += 1
            [draw.prompt], draw.occurrence = self._prompts.take(1), None
        raise TooManyQuarantined(
            f"{limit} prompts drawn in a row are all quarantined: remove the cause, or have data.sampler or the "
            f"weights of data.train choose others; the last: {self._sampler.last_quarantined}"
        )

    # Checkpoints and accounting.

    def _state(self) -> dict[str, Any]:
        self._tell()
        state = {
            "prompts": self._prompts.state_dict(),
            "quarantined": [asdict(record) for record in self._sampler.quarantined],
        }
        if not self._ahead:
            return state
        self._check()
        batches = [opened.state_dict() for opened in self._open]
        return state | {"ahead": {"shape": self._shape, "settled": dict(self._settled), "batches": batches}}

    def _check(self) -> None:
        """Every prompt that was taken is settled or in an open batch."""
        drawn = [draw.prompt.id for opened in self._open for draw in opened.draws]
        there = self._settled.total() + len(drawn)
        if there != self._prompts.taken:
            sides = " + ".join(f"{count} {name}" for name, count in self._settled.items())
            raise AccountingError(
                f"{self._prompts.taken} prompts were consumed, but {sides} + {len(drawn)} in open batches = {there}; "
                f"open: {drawn[:_SHOWN]}{'...' * (len(drawn) > _SHOWN)}: please report it, with the log"
            )
