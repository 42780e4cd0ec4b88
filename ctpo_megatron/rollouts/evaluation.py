"""Evaluation in training: when held-out prompts are answered and scored, and with what result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from ctpo_megatron.base.event_loop import EventLoop, Work, end
from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.config.schema import EvalConfig
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling
from ctpo_megatron.rollouts.group_sampler import GroupSampler
from ctpo_megatron.rollouts.samples import Sample, validation_metrics
from ctpo_megatron.rollouts.scoring import Scorer
from ctpo_megatron.tracking import Phases

_BEHIND = "time/eval_behind"


async def answer(
    sampler: GroupSampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    task: Callable[[Prompt], GroupTask],
    advance: Callable[[], None],
) -> list[Group]:
    """Return scored groups of the prompts, in their order, without quarantined ones.

    task: what an engine samples of a prompt. advance: called with every complete group. Raises as
    `GroupSampler.sample` and `RewardPool.score`.
    """

    async def answered(prompt: Prompt) -> Group | None:
        if prompt in sampler.quarantine:
            return None
        try:
            group = Group(prompt, await sampler.sample(task(prompt), urgent=True))
        except GroupFailed as error:
            sampler.lose(prompt, task(prompt).step, error)
            return None
        advance()
        await scorer.score([group])
        return group

    tasks = [asyncio.create_task(answered(prompt)) for prompt in prompts]
    try:
        return [group for group in await asyncio.gather(*tasks) if group is not None]
    finally:
        await end(tasks)


@dataclass(frozen=True)
class Evaluated:
    """The evaluation after a step. metrics: `val/*`. groups: the answers. missing: why there are none, if cut short."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    missing: str = ""


class Evaluation:
    """Answers held-out prompts with the weights published last. A context manager that ends what is under way."""

    def __init__(
        self,
        config: EvalConfig,
        loop: EventLoop,
        sampler: GroupSampler,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        stop: Stop,
        phases: Phases,
    ) -> None:
        """prompts: empty where there is nothing to evaluate."""
        self._config, self._loop, self._sampler, self._scorer = config, loop, sampler, scorer
        self._prompts, self._stop, self._phases = prompts[: config.prompts], stop, phases
        self._under_way: tuple[int, Work[tuple[list[Group], float]] | None] | None = None
        self._sampled = 0

    def run(self, step: int) -> Evaluated:
        """Answer and score now."""
        self.begin(step)
        evaluated = self.end()
        assert evaluated is not None
        evaluated.metrics.pop(_BEHIND, None)
        return evaluated

    def begin(self, step: int) -> None:
        """Begin what `run` does; `end` comes before the next weights, or the answers would be of two."""
        work, self._sampled = None, 0
        if self._prompts and not self._stop.is_set():
            self._sampler.engines.wait_ready()
            work = self._loop.begin(self._answers(step))
        self._under_way = (step, work)

    def end(self) -> Evaluated | None:
        """Wait for what `begin` began, if anything. Raises what sampling and scoring raise.

        Every group has its deadline (`rollout.group_timeout_s`) and its number of retries, which bounds the wait.
        """
        if self._under_way is None:
            return None
        (step, work), self._under_way = self._under_way, None
        if not self._prompts:
            return Evaluated(step)
        with self._phases.phase("eval"):
            try:
                if work is None:
                    raise Cancelled("stop requested before it began")
                groups, seconds = work.wait(self._stop)
            except Cancelled:
                count = len(self._prompts)
                return Evaluated(step, missing=f"{count - self._sampled} of {count} groups were not sampled")
        evaluated = self._evaluated(step, groups)
        evaluated.metrics[_BEHIND] = seconds
        return evaluated

    def lacks(self, record: Mapping[str, object]) -> bool:
        """Whether the metrics of a step hold no evaluation though there are prompts."""
        return bool(self._prompts) and not any(name.startswith("val/") for name in record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way is not None and (work := self._under_way[1]) is not None:
            work.cancel()

    async def _answers(self, step: int) -> tuple[list[Group], float]:
        config, began = self._config, time.monotonic()
        sampling, samples = Sampling(config.temperature, config.top_p, 0), tuple(range(config.samples))
        groups = await answer(
            self._sampler,
            self._scorer,
            self._prompts,
            lambda prompt: GroupTask(prompt, step, samples, sampling),
            self._advance,
        )
        return groups, time.monotonic() - began

    def _advance(self) -> None:
        self._sampled += 1
        self._phases.advance()

    def _evaluated(self, step: int, groups: list[Group]) -> Evaluated:
        left_out = len(self._prompts) - len(groups)  # quarantined: a benchmark without them is marked as such
        samples = [Sample.of(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        metrics = validation_metrics(samples)
        if left_out:
            metrics["val/prompts_left_out"] = float(left_out)
        return Evaluated(step, metrics, groups)
