"""What `Trainer.train` needs besides the batch, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ctpo_megatron.config import (
    ObjectiveConfig,
    PolicyConfig,
    RolloutConfig,
    advantage_from_config,
    objective_from_config,
)
from ctpo_megatron.policy.passes import configured_loss
from ctpo_megatron.policy.reports import Diagnostics, StepPositions

if TYPE_CHECKING:
    from ctpo_megatron.tracking import Phases


@dataclass(frozen=True)
class TrainSettings:
    """The RL phase of a run; the same on every rank.

    batches: of the run. updates_per_batch: optimizer steps of a full batch, in all its `passes`. mini_batch_size:
    trajectories of one optimizer step, over all ranks. seed: of the run. skip_zero_advantage: trajectories of advantage
    0 stay out of the model's passes. mismatch_limit, max_response_tokens: see `check_mismatch`. sampler_dtype:
    `Config.engine_dtype`. diagnostics: whether `TrainResult` has them. dump_every: of `is_dumped`. foreign: batches may
    be another policy's, whatever their weight versions: of a recording, whose log-probs are the anchor.
    """

    objective: ObjectiveConfig
    batches: int
    updates_per_batch: int
    mini_batch_size: int
    passes: int
    seed: int
    skip_zero_advantage: bool
    mismatch_limit: float | None
    max_response_tokens: int
    sampler_dtype: str
    diagnostics: bool
    dump_every: int
    foreign: bool = False

    def is_dumped(self, step: int) -> bool:
        """Whether every optimizer step of this RL step is kept token by token: `tracking.dump_every`."""
        return step in (1, self.batches) or step % self.dump_every == 0

    @classmethod
    def of(
        cls,
        objective: ObjectiveConfig,
        policy: PolicyConfig,
        rollout: RolloutConfig,
        *,
        batches: int,
        seed: int,
        skip_zero_advantage: bool,
        sampler_dtype: str,
        diagnostics: bool,
        dump_every: int,
    ) -> TrainSettings:
        """From the sections of a configuration."""
        return cls(
            objective,
            batches,
            updates_per_batch=rollout.prompts_per_step // policy.mini_batch_prompts * policy.passes_per_batch,
            mini_batch_size=policy.mini_batch_prompts * rollout.samples_per_prompt,
            passes=policy.passes_per_batch,
            seed=seed,
            skip_zero_advantage=skip_zero_advantage,
            mismatch_limit=rollout.mismatch_limit,
            max_response_tokens=rollout.max_response_tokens,
            sampler_dtype=sampler_dtype,
            diagnostics=diagnostics,
            dump_every=dump_every,
            foreign=rollout.replay is not None and objective.anchor == "behaviour",
        )


class Reinforcement:
    """The RL phase of a trainer: its settings, and the objects that it derives from them once.

    ratio: the objective whose ratio and bounds are known; None for a user's own. knows_turns: whether the loss is given
    the turn of every token.
    """

    def __init__(self, settings: TrainSettings, phases: Phases) -> None:
        self.settings = settings
        self.phases = phases
        self.advantage = advantage_from_config(settings.objective)
        self.objective = objective_from_config(settings.objective)
        self.ratio = None if settings.objective.function else self.objective
        self.loss = configured_loss(settings.objective)
        self.knows_turns = settings.objective.by_turn or settings.objective.function is not None


@dataclass(frozen=True)
class TrainResult:
    """metrics: of the RL step, complete on rank zero. diagnostics: see `Trainer.token_diagnostics`; may be empty.

    positions: statistics by position, on rank zero. dumped: see `TrainSettings.is_dumped`.
    """

    metrics: dict[str, float]
    diagnostics: Diagnostics
    positions: StepPositions | None = None
    dumped: bool = False
