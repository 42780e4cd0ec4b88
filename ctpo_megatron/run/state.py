"""Where a run stands: steps done, version of the weights, and whether it is asked to end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ctpo_megatron.config import Config
from ctpo_megatron.policy import Layout
from ctpo_megatron.run.preemption import Preemption


@dataclass(frozen=True)
class StopOrLostRank:
    """What rank zero checks while it samples: whether to stop. Raises RankLost when another rank is gone."""

    preemption: Preemption
    layout: Layout

    def is_set(self) -> bool:
        """See `rollouts.Stop`."""
        self.layout.check_ranks()
        return self.preemption.asked()


@dataclass
class RunState:
    """The same on every rank.

    done: RL steps finished. version: of the policy's weights; 1 before the first step. preempted: the run was
    asked to end, and the loop ends after the step in which it was noticed. resumed: RL goes on from a checkpoint.
    """

    config: Config
    preemption: Preemption
    done: int = 0
    version: int = 1
    preempted: bool = False
    resumed: bool = False

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early when the run is preempted. Collective."""
        while self.done < self.config.run.steps and not self.preempted:
            yield self.done + 1
        self.notice()  # a run without steps may have been asked to end in its evaluation

    def stop(self) -> None:
        """End the loop: the rollout source was asked to end."""
        self.preempted = True

    def notice(self) -> bool:
        """Whether any rank was asked to end; collective."""
        self.preempted = self.preempted or self.preemption.requested()
        return self.preempted

    def advance(self) -> int:
        """A step's updates are done: the new version of the weights."""
        self.done += 1
        self.version += 1
        return self.version

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after the steps done: by `eval.before_training`, `eval.every`, or the last."""
        every = self.config.eval.every
        if self.done in (0, self.config.run.steps):
            return self.done == self.config.run.steps or self.config.eval.before_training
        return every > 0 and self.done % every == 0

    @property
    def awaits_evaluation(self) -> bool:
        """Whether what comes after the evaluation needs its result: a checkpoint that is ranked by it, or the end."""
        settings = self.config.checkpoint
        ranked = settings.keep_best > 0 and settings.best_metric.startswith("val/")
        return self.done == self.config.run.steps or (self.saves and ranked)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due after the steps done."""
        every = self.config.checkpoint.every
        return every > 0 and self.done % every == 0
