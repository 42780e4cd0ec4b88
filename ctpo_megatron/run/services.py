"""What runs next to the trainer, on rank zero: prompts, sandbox, engines or a recording, scorers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.stop import StopRequest
from ctpo_megatron.config import (
    Config,
    DataConfig,
    Job,
    Placement,
    RolloutConfig,
    evaluates,
    needs_engines,
    node_ranks,
    world_size,
)
from ctpo_megatron.data import Curriculum, MixedFile, PromptMix, PromptSampler, PromptSet, PromptStream
from ctpo_megatron.environments import usable, write_record
from ctpo_megatron.policy import capabilities
from ctpo_megatron.preflight import Admission, NodeComparison
from ctpo_megatron.rewards import OverlongPenalty, RewardPool, Scorer
from ctpo_megatron.rollouts import Evaluation, EventLoop, GroupSampler, Replay, Rollouts, RolloutSettings
from ctpo_megatron.tracking import Phases, recorded_trajectories, trajectory_files

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool


@dataclass(frozen=True)
class Services:
    """What rank zero owns besides its share of the trainer."""

    rollouts: Rollouts
    evaluation: Evaluation
    pool: EnginePool | None = None
    """The engines; None for a recording without evaluations."""
    record_data: Callable[[], None] = lambda: None
    """Writes `data.json`; for when nothing refuses a resume any more."""


@contextmanager
def start_services(config: Config, directory: Path, phases: Phases, stop: StopRequest) -> Iterator[Services]:
    """Start sandbox, engines and scorers, and read the prompts; the engines load in the background.

    stop: checked while engines start and groups are sampled. Raises DataError for bad prompts, TokenizerError for a
    chat template that cannot be used, and ConfigError for a tokenizer of more tokens than the model has. Raises
    DamagedFileError for stored rows that are damaged.
    """
    admission = Admission.of(config, directory)
    admission.check_vocabulary()
    logs = RunPaths(directory).logs
    with ExitStack() as stack:
        pool, loop = None, stack.enter_context(EventLoop())
        if needs_engines(config):  # first: engines load while prompts are read and scorers start
            from ctpo_megatron.engines import open_engines  # only here: a replay alone needs no Ray

            placement = Placement.of(config, Job(world_size(), node_ranks())) if capabilities().cuda else None
            check = partial(NodeComparison.of, config)
            opened = open_engines(config, logs.root, loop, placement=placement, check=check, stop=stop)
            pool = stack.enter_context(opened)
        train = admission.training()
        usable(train)
        held_out = usable(admission.held_out(train)) if evaluates(config) else []
        prompts = _stream(train, config.data, config.run.seed)
        sampler = answering = GroupSampler(_source(config.rollout, pool), config.rollout)
        if config.rollout.replay is not None and pool is not None:  # a recording has no answers of these weights
            answering = GroupSampler(pool, config.rollout)
        scorers = stack.enter_context(RewardPool(config.reward, config.extensions.path, logs.rewards))
        penalty = None
        if (overlong := config.reward.overlong_penalty) is not None:
            penalty = OverlongPenalty(overlong.buffer, overlong.penalty, config.rollout.max_response_tokens)
        scoring = Scorer(scorers, penalty, by_turn=config.objective.by_turn)
        settings = RolloutSettings.of(config)
        rollouts = Rollouts(settings, loop, sampler, scoring, prompts, stop, phases)
        evaluation = Evaluation(config.eval, loop, answering, Scorer(scorers), held_out, stop, phases)
        record = partial(write_record, train, directory)
        yield Services(stack.enter_context(rollouts), stack.enter_context(evaluation), pool, record)


def _stream(train: PromptSet, data: DataConfig, seed: int) -> PromptStream:
    if data.sampler is not None:
        return Curriculum(data.sampler, train.prompts, seed, rerendered=data.rerender)
    if (weights := data.train_weights) is None:
        return PromptSampler(train.prompts, seed, data.shuffle, rerendered=data.rerender)
    parts = zip(data.train_files, weights, train.mix(data.train_files), strict=True)
    return PromptMix([MixedFile(*part) for part in parts], seed, data.shuffle, rerendered=data.rerender)


def _source(rollout: RolloutConfig, pool: EnginePool | None) -> EnginePool | Replay:
    """Return what gives the trajectories to train on. pool: of the run's engines."""
    if rollout.replay is None:
        assert pool is not None  # a run without a recording starts engines
        return pool
    recorded = trajectory_files(Path(rollout.replay))
    return Replay(lambda step: recorded_trajectories(recorded[step]), rollout, pool)
