"""What rank zero owns and does alone: it samples, publishes and evaluates."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ctpo_megatron.base.stop import Cancelled, StopSignal
from ctpo_megatron.config import Config, shares_gpus
from ctpo_megatron.data import Batch
from ctpo_megatron.engines import give_way_to_engines
from ctpo_megatron.policy import Layout, capabilities
from ctpo_megatron.rollouts import Evaluated
from ctpo_megatron.run.directory import check_there
from ctpo_megatron.run.ranks import TrainerGroup
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.run.services import Services

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StopOrLostRank:
    """What rank zero checks while it waits: whether to stop.

    Raises RankLost when another rank is gone, and RunDirectoryError when the directory of the run is.
    """

    stop: StopSignal
    layout: Layout
    directory: Path

    def is_set(self) -> bool:
        """See `Stop`."""
        self.layout.check_ranks()
        check_there(self.directory)
        return self.stop.is_set()

    def ask(self, cause: str) -> None:
        """See `StopRequest`."""
        self.stop.ask(cause)


class Controller:
    """Rollouts and evaluation of a run, in the order that the weights and the GPUs need. Lives on rank zero.

    Where engines and trainer share GPUs they take turns: the trainer leaves before engines wake to sample, and engines
    sleep when it computes (`TrainerGroup.share_gpus`).
    """

    def __init__(self, config: Config, trainer: TrainerGroup, services: Services, report: Reporter) -> None:
        """Engines that share GPUs sleep from now on: vLLM measures a GPU when it starts, so the trainer must take
        memory afterwards."""
        self._trainer, self._report = trainer, report
        self._rollouts, self._evaluation, self._pool = services.rollouts, services.evaluation, services.pool
        self._ahead, self._dtype = config.rollout.ahead > 0, config.policy.dtype
        # Not before the thread of the rollouts has begun, which would do the same.
        self._yields = self._ahead and not capabilities().cuda
        self._connected = False
        self._shared = services.pool if shares_gpus(config) else None
        if self._shared is not None:
            self._shared.sleep(level=2)
            trainer.share_gpus(self._shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.disconnect()

    def check_start(self) -> None:
        """Raises EngineError as soon as it is known that the engines, which load in the background, do not start."""
        if self._pool is not None:  # a recording has none
            self._pool.check_start()

    def publish(self, version: int) -> None:
        """Have the engines sample with the trainer's weights, which are `version`, and free its device memory.

        Waits for an evaluation of the former weights. Returns at once when the run is to stop.
        """
        self.end_evaluation()
        try:
            self._connect()
            with self._report.phase("publish"):
                if not self._rollouts.publish(self._trainer, version):
                    return
                self._wake_engines()
        except Cancelled as cancelled:
            log.info("weights %d: %s", version, cancelled)
            return
        self._trainer.release()

    def _connect(self) -> None:
        """Wait until the engines are up, and open the way for their weights."""
        if self._connected:
            return
        with self._report.phase("engine_start"):
            self._report.note("waiting for the engines to load")
            if self._pool is not None:
                facts = self._pool.wait_ready()
                chosen = self._pool.settings.weights.transport
                log.info("weights go to the engines by %s (rollout.weights.transport: %s)", facts.transport, chosen)
                self._compare_precision(str(facts.dtype).removeprefix("torch."))
                self._trainer.connect(facts, self._pool)
        self._connected = True

    def _compare_precision(self, sampler: str) -> None:
        """Say where the engines have come up in another precision than the trainer's, whatever was configured."""
        if sampler != self._dtype:
            sides = f"the engines compute in {sampler} (rollout.engine.dtype), the trainer in {self._dtype}"
            log.warning("warning: %s (policy.dtype): their log-probs will differ by rounding", sides)

    def next_batch(self, step: int) -> Batch | None:
        """The batch of a step; None when the run is to stop."""
        try:
            self._wake_engines()
        except Cancelled as cancelled:
            log.info("step %d: %s", step, cancelled)
            return None
        if self._yields:
            self._yields = False
            give_way_to_engines()
        # A batch that is sampled when it is requested times its own phases.
        with self._report.phase("wait_rollout") if self._ahead else nullcontext():
            batch = self._rollouts.next_batch(step)
        if batch is not None and self._shared is not None:
            self._shared.sleep(level=2)  # these weights are not sampled again, so the engines may drop them
        return batch

    def _wake_engines(self) -> None:
        """Before engines sample on shared GPUs: every rank leaves them, then the engines wake. Raises Cancelled."""
        if self._shared is not None and self._shared.is_asleep:
            self._trainer.release()
            self._shared.wake()

    def evaluate(self, step: int, *, awaited: bool) -> None:
        """Answer the held-out prompts with the weights published last, for the line of `step`.

        Where engines sample ahead training continues meanwhile, unless the result is `awaited`: `publish` waits for it,
        as all answers are to be of one version.
        """
        if self._ahead and not awaited:
            self._evaluation.begin(step)
            return
        try:
            self._wake_engines()
            evaluated = self._evaluation.run(step)
        except Cancelled as cancelled:
            evaluated = Evaluated(step, missing=str(cancelled))
        self._report.log(*self._kept(evaluated))

    def end_evaluation(self) -> None:
        """Wait for an evaluation that is under way, and add it to the line of its step, the latest."""
        if (evaluated := self._evaluation.end()) is not None:
            self._report.log_evaluation(*self._kept(evaluated))

    def _kept(self, evaluated: Evaluated) -> tuple[int, dict[str, float]]:
        """Dump the answers of an evaluation; its step and metrics."""
        if evaluated.missing:
            self._report.note(f"[eval] step {evaluated.step}: MISSING, stop requested meanwhile ({evaluated.missing})")
        if evaluated.groups:
            self._report.dump_evaluation(evaluated.step, evaluated.groups)
        return evaluated.step, evaluated.metrics

    def lacks_evaluation(self) -> bool:
        """Whether the latest step was logged without an evaluation."""
        return self._evaluation.lacks(self._report.latest)

    def begin_trace(self, step: int) -> None:
        """Have the engines record what they do, until `end_trace`."""
        if self._pool is not None:
            self._pool.begin_trace(step)

    def end_trace(self) -> None:
        """Have the engines write their traces."""
        if self._pool is not None:
            self._pool.end_trace()

    def wait_for_updates(self) -> None:
        """Wait for what is under way behind the training: an evaluation, and engines that take the last weights.

        Raises what became of them.
        """
        self.end_evaluation()
        if self._pool is not None:
            self._pool.finish_update()
