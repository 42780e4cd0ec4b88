"""Where a run stands: its steps, and what is due after each of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ctpo_megatron.base.stop import BEGUN, Cancelled, StopSignal
from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch
from ctpo_megatron.policy import CheckpointWriteError, TrainResult
from ctpo_megatron.run.controller import Controller
from ctpo_megatron.run.persistence import Persistence
from ctpo_megatron.run.ranks import TrainerGroup
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.run.verdicts import TooManyFailed, Verdicts

log = logging.getLogger(__name__)


class Run:
    """The steps of a run: counts them, logs them, evaluates and saves when due, ends when a rank is to stop.

    Lives on rank zero, which decides for all ranks. done: RL steps finished. resumed: RL continues from a checkpoint.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainerGroup,
        controller: Controller,
        persistence: Persistence,
        report: Reporter,
        stop: StopSignal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, for `checkpoint.every: auto`."""
        self.config, self._trainer, self._controller = config, trainer, controller
        self._persistence, self._report, self._stop = persistence, report, stop
        self._verdicts = Verdicts(config.reward.max_failed)
        self._clock, self._saved_at = clock, clock()
        self.done = 0
        self._updating = False
        self.resumed = False

    @property
    def version(self) -> int:
        """Of the trainer's weights: 1 before the first step, one more after each."""
        return self._trainer.version

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop: its state is saved, and no step follows."""
        return self._stop.is_set()

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early when the run is to stop."""
        while self.done < self.config.run.steps and not self.stopped:
            step = self.done + 1
            traced = step in self.config.run.profile_steps
            with self._report.progress.within("step"):
                if traced:
                    self._controller.begin_trace(step)
                    self._trainer.begin_trace(step)
                yield step
                if traced:
                    with self._report.phase("profile"):
                        self._trainer.end_trace(step, self.config.run.directory)
                        self._controller.end_trace()

    def restore(self, checkpoint: Path | None) -> None:
        """Continue from a checkpoint, or begin."""
        done = self._persistence.restore(checkpoint)
        self.resumed = done is not None
        self.done = done or 0

    def begin(self) -> None:
        """Log, evaluate and save the state before the first step."""
        if not self.resumed or (self.evaluates and self._controller.lacks_evaluation()):
            self._report.log(self.done, {})
            self._evaluate()  # also in a run that is to stop: it reports what is missing
        if not self.resumed and self.saves:
            self._save()

    def agree_to_stop(self) -> bool:
        """Whether the run is to stop, because any rank is."""
        return self._trainer.stop_agreed()

    def begin_updates(self) -> None:
        """From now until `finish_step` the weights are ahead of the steps done."""
        self._updating = True

    def finish_step(self, step: int, batch: Batch, result: TrainResult) -> None:
        """A step's updates are done: log it; evaluate and save when due.

        Raises TooManyFailed, once the state is saved, when `reward.max_failed` is exceeded.
        """
        self.done, self._updating = step, False
        # Before the line of this step begins: its result belongs to the line of an earlier one.
        self._controller.end_evaluation()
        self._report.log_step(step, batch, result)
        self._verdicts.add(step, batch)
        if self.stopped:
            return
        if problem := self._verdicts.problem:
            self._persistence.ensure_saved(step)
            raise TooManyFailed(problem)
        self._evaluate()
        if self.stopped:
            return
        if self.saves:
            self._save()
        self._keep(self._trainer.finish_save(wait=False))

    def _save(self) -> None:
        self._saved_at = self._clock()
        self._persistence.save(self.done)

    def _evaluate(self) -> None:
        if self.evaluates:
            self._controller.evaluate(self.done, awaited=self.awaits_evaluation)

    def end(self) -> bool:
        """No step follows: finish what is under way, and save if the run is to stop. Whether all steps were done."""
        try:
            if not self._trainer.stop_agreed():
                self._controller.wait_for_updates()
        except Cancelled as cancelled:
            log.info("%s", cancelled)
        if self._trainer.stop_agreed():
            self._controller.end_evaluation()
            self._persistence.ensure_saved(self.done)
            return False
        self._keep(self._trainer.finish_save())
        return True

    def _keep(self, failed: CheckpointWriteError | None) -> None:
        """Save once more, and wait, where a save in the background has failed."""
        if failed is not None:
            self._persistence.save_again(self.done, failed)

    @contextmanager
    def saved_at_least(self) -> Iterator[None]:
        """Within, a failure that is not a refusal of the run gets a note (`BEGUN`); one to write a file a checkpoint.

        That is where the run has trained, now or before a resume. Nothing is saved within a step's updates: the weights
        are between two steps then, and other ranks may wait in a collective. Nor where a file was removed: a checkpoint
        would be in the same directory.
        """
        try:
            yield
        except Exception as error:
            if self.done:
                error.add_note(f"{BEGUN} {self.done}")
                if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not self._updating:
                    self._save_after(error)
            raise

    def _save_after(self, error: OSError) -> None:
        log.error("the run ends after step %d, and is saved first: %s", self.done, error)
        try:
            self._persistence.ensure_saved(self.done)
        except Exception as failed:  # the error that came first is raised, with its note
            log.error("the state after step %d could not be saved: %s", self.done, failed)

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after the steps done."""
        return self.config.eval.due(self.done, self.config.run.steps)

    @property
    def awaits_evaluation(self) -> bool:
        """Whether what comes after the evaluation needs its result: a checkpoint that is ranked by it, or the end."""
        settings = self.config.checkpoint
        ranked = settings.keep_best > 0 and settings.best_metric.startswith("val/")
        return self.done == self.config.run.steps or (self.saves and ranked)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due after the steps done."""
        since_s, write_s = self._clock() - self._saved_at, self._persistence.write_s
        return self.config.checkpoint.due(self.done, self.config.run.steps, since_s=since_s, write_s=write_s)
