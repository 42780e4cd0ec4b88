"""What runs beside the trainer, on rank zero: prompts, sandbox, engines or a recording, scorers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.config import Config, Job, Placement, node_ranks, world_size
from ctpo_megatron.data import PromptSampler
from ctpo_megatron.engines import EnginePool, check_tokenizer, open_engines
from ctpo_megatron.environments.prompts import held_out_prompts, training_prompts, usable
from ctpo_megatron.environments.tokenizer import training_tokenizer
from ctpo_megatron.policy import capabilities
from ctpo_megatron.rewards import OverlongPenalty, RewardPool
from ctpo_megatron.rollouts import AsyncRollouts, Collector, Evaluation, Replay, RolloutSource, SampledRollouts, Scoring
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.tracking import recorded_trajectories, trajectory_files


@dataclass(frozen=True)
class Services:
    """What rank zero owns beside its share of the policy."""

    rollouts: RolloutSource
    evaluation: Evaluation
    fleet: EnginePool | None = None
    """The engines; None for a recording."""


@contextmanager
def start_services(
    config: Config, directory: Path, report: Reporter, cancelled: Callable[[], bool]
) -> Iterator[Services]:
    """Read the prompts and start sandbox, engines and scorers; the engines load in the background.

    cancelled: whether the run is asked to end; looked at while groups are sampled. Raises DataError for bad prompts,
    TokenizerError for a chat template that cannot be used, ConfigError for a tokenizer of more tokens than the model
    has.
    """
    tokenizer = training_tokenizer(config)
    check_tokenizer(config, len(tokenizer))
    train = usable(training_prompts(config, tokenizer), directory)
    # A recording has no answers of these weights to the held-out prompts.
    replayed = config.rollout.replay is not None
    held_out = [] if replayed or not config.data.eval else usable(held_out_prompts(config, tokenizer))
    prompts = PromptSampler(train, config.run.seed, config.data.shuffle)
    with ExitStack() as stack:
        engines = _engines(config, directory, stack, report.progress.advance)
        scorers = stack.enter_context(RewardPool(config.reward, config.extensions.path))

        scoring = Scoring(scorers, _overlong_penalty(config))
        mini = config.policy.mini_batch_prompts
        rollouts: RolloutSource
        if config.rollout.max_staleness and not isinstance(engines, Replay):
            steps = config.run.steps
            ahead = AsyncRollouts(
                config.rollout, engines, scoring, prompts, cancelled, steps=steps, mini_batch_prompts=mini
            )
            rollouts = stack.enter_context(ahead)
        else:
            training = Collector(engines, scoring, cancelled)
            rollouts = SampledRollouts(
                config.rollout, training, engines, prompts, report.phase, mini_batch_prompts=mini
            )
        collector = Collector(engines, Scoring(scorers), cancelled)
        reporting = (report.dump_evaluation, report.phase, report.note)
        evaluation = Evaluation(config.eval, collector, held_out, *reporting, cancelled)
        yield Services(rollouts, stack.enter_context(evaluation), engines if isinstance(engines, EnginePool) else None)


def _overlong_penalty(config: Config) -> OverlongPenalty | None:
    if (settings := config.reward.overlong_penalty) is None:
        return None
    return OverlongPenalty(settings.buffer, settings.penalty, config.rollout.max_response_tokens)


def _engines(config: Config, directory: Path, stack: ExitStack, finished: Callable[[], None]) -> EnginePool | Replay:
    if config.rollout.replay is None:
        placement = Placement.of(config, Job(world_size(), node_ranks())) if capabilities().cuda else None
        return stack.enter_context(open_engines(config, directory / "logs", placement=placement, finished=finished))
    recorded = trajectory_files(Path(config.rollout.replay))
    return Replay(
        lambda step: recorded_trajectories(recorded[step]),
        config.rollout.max_quarantined,
        refills=config.rollout.uniform_groups == "refill",
    )
