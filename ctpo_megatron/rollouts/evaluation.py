"""When held-out prompts are answered and scored, and with what result."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Self

from ctpo_megatron.config.schema import EvalConfig
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines.tasks import Cancelled, Sampling
from ctpo_megatron.rollouts.samples import Sample, validation_metrics
from ctpo_megatron.rollouts.source import Collector, Phase

log = logging.getLogger(__name__)

_JOIN_S = 30.0


class Evaluation:
    """Answers `prompts` with the weights published last; lives on rank zero. A context manager that ends its thread."""

    def __init__(
        self,
        config: EvalConfig,
        collector: Collector,
        prompts: Sequence[Prompt],
        dump: Callable[[int, Sequence[Group]], None],
        phase: Phase,
        note: Callable[[str], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """prompts: none where there is nothing to evaluate. dump: keeps the groups of a step for people to read.

        note: says a line on the terminal. cancelled: as for `Collector`; may be asked by another thread.
        """
        self._config, self._collector, self._note = config, collector, note
        self._prompts, self._dump, self._phase = prompts[: config.prompts], dump, phase
        self._cancelled, self._closed = cancelled, False
        self._under_way: tuple[int, Future[tuple[list[Group], float]]] | None = None

    def run(self, step: int) -> dict[str, float]:
        """`val/*` metrics; empty without prompts, or when the run was asked to end meanwhile."""
        if not self._prompts:
            return {}
        with self._phase("eval"):
            try:
                groups = self._answers(step)
            except Cancelled as cancelled:
                return self._missing(step, cancelled)
            self._dump(step, groups)
        return self._metrics(groups)

    def begin(self, step: int) -> None:
        """Begin what `run` does, in a thread; `end` comes before the next weights, or the answers would be of two."""
        answers: Future[tuple[list[Group], float]] = Future()
        self._under_way = (step, answers)
        threading.Thread(target=self._work, args=(step, answers), name="evaluation", daemon=True).start()

    def end(self) -> tuple[int, dict[str, float]]:
        """Wait for what `begin` began: its step, and what `run` returns. Raises what sampling and scoring raise.

        Every group has its deadline (`rollout.group_timeout_s`) and so many retries, which bounds the wait.
        """
        assert self._under_way is not None, "begin comes before end"
        (step, answers), self._under_way = self._under_way, None
        if not self._prompts:
            return step, {}
        with self._phase("eval"):
            try:
                groups, seconds = answers.result()
            except Cancelled as cancelled:
                return step, self._missing(step, cancelled)
            self._dump(step, groups)
        return step, self._metrics(groups) | {"time/eval_behind": seconds}

    def lacks(self, record: Mapping[str, object]) -> bool:
        """Whether the metrics of a step hold no evaluation though there are prompts."""
        return bool(self._prompts) and not any(name.startswith("val/") for name in record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        if self._under_way is not None and not wait([self._under_way[1]], _JOIN_S).done:
            log.warning("the thread of the evaluation has not ended after %g s, and is left behind", _JOIN_S)

    def _work(self, step: int, answers: Future[tuple[list[Group], float]]) -> None:
        began = time.monotonic()
        try:
            answers.set_result((self._answers(step), time.monotonic() - began))
        except BaseException as error:  # whatever it is, `end` raises it
            answers.set_exception(error)

    def _answers(self, step: int) -> list[Group]:
        groups, _ = self._collector.collect(
            self._prompts,
            step=step,
            samples=self._config.samples,
            sampling=Sampling(self._config.temperature, self._config.top_p, 0),
            phase=lambda _: nullcontext(),  # its parts are no phases of a training step
            cancelled=lambda: self._closed or self._cancelled(),
        )
        return groups

    def _missing(self, step: int, cancelled: Cancelled) -> dict[str, float]:
        self._note(f"[eval] step {step}: MISSING, the run was asked to end meanwhile ({cancelled})")
        return {}

    def _metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        left_out = len(self._prompts) - len(groups)  # quarantined: nothing may take their place here
        samples = [Sample.of(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        return validation_metrics(samples) | ({"val/prompts_left_out": float(left_out)} if left_out else {})
