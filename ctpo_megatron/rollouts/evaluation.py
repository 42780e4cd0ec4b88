"""Evaluation in training: when held-out prompts are answered and scored, and with what result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from ctpo_megatron.base.event_loop import EventLoop, Work, end
from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.config.schema import EvalConfig
from ctpo_megatron.data import Group, Prompt
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling
from ctpo_megatron.rewards import Scorer
from ctpo_megatron.rollouts.group_sampler import GroupSampler
from ctpo_megatron.rollouts.metrics import validation_metrics
from ctpo_megatron.tracking import Phases

_BEHIND = "time/eval_behind"


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
        self._under_way: tuple[int, Work[Evaluated] | None] | None = None
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
            work = self._loop.begin(self._evaluated(step))
        self._under_way = (step, work)

    def end(self) -> Evaluated | None:
        """Wait for what `begin` began, if anything. Raises what sampling and scoring raise."""
        if self._under_way is None:
            return None
        (step, work), self._under_way = self._under_way, None
        if not self._prompts:
            return Evaluated(step)
        with suppress(Cancelled), self._phases.phase("eval"):
            if work is not None:
                return work.wait(self._stop)
        count = len(self._prompts)
        return Evaluated(step, missing=f"{count - self._sampled} of {count} groups were not sampled")

    def lacks(self, record: Mapping[str, object]) -> bool:
        """Return whether the metrics of a step hold no evaluation though there are prompts."""
        return bool(self._prompts) and not any(name.startswith("val/") for name in record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way and self._under_way[1]:
            self._under_way[1].cancel()

    async def _evaluated(self, step: int) -> Evaluated:
        began = time.monotonic()
        tasks = [asyncio.create_task(self._answer(prompt, step)) for prompt in self._prompts]
        try:
            groups = [group for group in await asyncio.gather(*tasks) if group is not None]
        finally:
            await end(tasks)
        metrics = {_BEHIND: time.monotonic() - began} | validation_metrics(groups)
        if left_out := len(self._prompts) - len(groups):  # a benchmark without quarantined prompts is marked as such
            metrics["val/prompts_left_out"] = float(left_out)
        return Evaluated(step, metrics, groups)

    async def _answer(self, prompt: Prompt, step: int) -> Group | None:
        """The scored group of a prompt; None where it is in quarantine."""
        if self._sampler.is_quarantined(prompt):
            return None
        sampling, samples = Sampling(self._config.temperature, self._config.top_p, 0), range(self._config.samples)
        try:
            trajectories = await self._sampler.sample(GroupTask(prompt, step, tuple(samples), sampling), urgent=True)
        except GroupFailed as error:
            self._sampler.lose(prompt, step, error)
            return None
        self._sampled += 1
        self._phases.advance()
        group = Group(prompt, trajectories)
        await self._scorer.score([group])
        return group
