"""Evaluation in training: when held-out prompts are answered and scored, and with what result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Self

from ctpo_megatron.base.stop import Cancelled, Stop
from ctpo_megatron.config.schema import EvalConfig
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines import Sampling
from ctpo_megatron.rollouts.request import Generator, Request, ticks
from ctpo_megatron.rollouts.samples import Sample, validation_metrics
from ctpo_megatron.rollouts.scoring import PendingScoring, Scorer
from ctpo_megatron.rollouts.timeouts import JOIN_TIMEOUT_S
from ctpo_megatron.tracking import Phases

log = logging.getLogger(__name__)


def answer(
    generator: Generator, scorer: Scorer, prompts: Sequence[Prompt], request: Request, stop: Stop, phases: Phases
) -> list[Group]:
    """Scored groups of the prompts, in their order, without quarantined prompts. Raises as `ticks`."""
    groups: dict[int, Group] = {}
    scoring: list[PendingScoring] = []
    for answers in ticks(generator, prompts, request, stop):
        for slot, group in answers.groups:
            phases.advance()
            groups[slot] = group
            scoring.append(scorer.begin([group]))
    for pending in scoring:
        pending.result()
    return [groups[slot] for slot in sorted(groups)]


@dataclass(frozen=True)
class Evaluated:
    """The evaluation after a step. metrics: `val/*`. groups: the answers. missing: why there are none, if cut short."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    missing: str = ""


class Evaluation:
    """Answers held-out prompts with the weights published last. A context manager that ends its thread."""

    def __init__(
        self,
        config: EvalConfig,
        generator: Generator,
        scorer: Scorer,
        prompts: Sequence[Prompt],
        stop: Stop,
        phases: Phases,
    ) -> None:
        """prompts: empty where there is nothing to evaluate. stop: may be checked by another thread."""
        self._config, self._generator, self._scorer = config, generator, scorer
        self._prompts, self._stop, self._phases = prompts[: config.prompts], stop, phases
        self._closed = False
        self._under_way: tuple[int, Future[tuple[list[Group], float]]] | None = None

    def run(self, step: int) -> Evaluated:
        """Answer and score now."""
        if not self._prompts:
            return Evaluated(step)
        with self._phases.phase("eval"):
            try:
                return self._evaluated(step, self._answers(step))
            except Cancelled as cancelled:
                return Evaluated(step, missing=str(cancelled))

    def begin(self, step: int) -> None:
        """Begin what `run` does, in a thread; `end` comes before the next weights, or the answers would be of two."""
        answers: Future[tuple[list[Group], float]] = Future()
        self._under_way = (step, answers)
        threading.Thread(target=self._work, args=(step, answers), name="evaluation", daemon=True).start()

    def end(self) -> Evaluated | None:
        """Wait for what `begin` began, if anything. Raises what sampling and scoring raise.

        Every group has its deadline (`rollout.group_timeout_s`) and its number of retries, which bounds the wait.
        """
        if self._under_way is None:
            return None
        (step, answers), self._under_way = self._under_way, None
        if not self._prompts:
            return Evaluated(step)
        with self._phases.phase("eval"):
            try:
                groups, seconds = answers.result()
            except Cancelled as cancelled:
                return Evaluated(step, missing=str(cancelled))
        evaluated = self._evaluated(step, groups)
        evaluated.metrics["time/eval_behind"] = seconds
        return evaluated

    def lacks(self, record: Mapping[str, object]) -> bool:
        """Whether the metrics of a step hold no evaluation though there are prompts."""
        return bool(self._prompts) and not any(name.startswith("val/") for name in record)

    def is_set(self) -> bool:
        """Whether to stop answering: a `Stop`."""
        return self._closed or self._stop.is_set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._under_way is not None and not wait([self._under_way[1]], JOIN_TIMEOUT_S).done:
            log.warning("the evaluation thread has not ended after %g s, and is left behind", JOIN_TIMEOUT_S)

    def _work(self, step: int, answers: Future[tuple[list[Group], float]]) -> None:
        began = time.monotonic()
        try:
            answers.set_result((self._answers(step), time.monotonic() - began))
        except BaseException as error:  # whatever it is, `end` raises it
            answers.set_exception(error)

    def _answers(self, step: int) -> list[Group]:
        config = self._config
        request = Request(step, config.samples, Sampling(config.temperature, config.top_p, 0))
        return answer(self._generator, self._scorer, self._prompts, request, self, self._phases)

    def _evaluated(self, step: int, groups: list[Group]) -> Evaluated:
        left_out = len(self._prompts) - len(groups)  # quarantined: a benchmark without them is marked as such
        samples = [Sample.of(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        metrics = validation_metrics(samples)
        if left_out:
            metrics["val/prompts_left_out"] = float(left_out)
        return Evaluated(step, metrics, groups)
