"""What runs beside the trainer, on rank zero: prompts, sandbox, engines or a recording, scorers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ctpo_megatron.config import (
    ClusterConfig,
    Config,
    ConfigError,
    Job,
    Placement,
    Problem,
    node_ranks,
    spec_for,
    world_size,
)
from ctpo_megatron.data import PromptSampler, load_prompts
from ctpo_megatron.environments import node_sandbox
from ctpo_megatron.environments.factory import needs_sandbox, offered_schemas, system_prompt
from ctpo_megatron.environments.tokenizer import training_tokenizer
from ctpo_megatron.evaluate import Evaluation
from ctpo_megatron.policy import capabilities
from ctpo_megatron.ray_environment import ADDRESS
from ctpo_megatron.rewards import OverlongPenalty, RewardPool
from ctpo_megatron.rollout import Collector, Replay, RolloutFleet, RolloutSource, SampledRollouts
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.run.scoring import Scoring
from ctpo_megatron.tracking import read_trajectories, trajectory_files, trajectory_of
from ctpo_sandbox import Limits, start_server

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What rank zero owns beside its share of the policy."""

    rollouts: RolloutSource
    evaluation: Evaluation
    fleet: RolloutFleet | None = None
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
    _check_tokenizer(config, len(tokenizer))
    read = functools.partial(
        load_prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.data.max_prompt_tokens,
        tool_schemas=offered_schemas(config),
        chat_template_kwargs=config.model.chat_template_kwargs,
        system_prompt=system_prompt(config),
    )
    prompts = PromptSampler(read(config.data.train), config.run.seed, config.data.shuffle)
    # A recording has no answers of these weights to the held-out prompts.
    held_out = read(config.data.eval) if config.data.eval and config.rollout.replay is None else []
    with ExitStack() as stack:
        engines = _engines(config, directory, stack, report.progress.advance)
        scorers = stack.enter_context(RewardPool(config.reward, config.extensions.path))

        rollouts = SampledRollouts(
            config.rollout,
            Collector(engines, Scoring(scorers, _overlong_penalty(config)), cancelled),
            engines,
            prompts,
            report.phase,
            mini_batch_prompts=config.policy.mini_batch_prompts,
        )
        collector = Collector(engines, Scoring(scorers), cancelled)
        evaluation = Evaluation(config.eval, collector, held_out, report.dump_evaluation, report.phase)
        yield Services(rollouts, evaluation, engines if isinstance(engines, RolloutFleet) else None)


def _check_tokenizer(config: Config, tokens: int) -> None:
    if tokens > (rows := spec_for(config).vocab_size):
        message = f"the tokenizer has {tokens} tokens, but the model's vocabulary {rows} (vocab_size in config.json)"
        fix = "resize the model's embeddings for the tokens that were added, or use the tokenizer it came with"
        raise ConfigError([Problem("model.path", message, fix, config.model.path)])


def _overlong_penalty(config: Config) -> OverlongPenalty | None:
    if (settings := config.reward.overlong_penalty) is None:
        return None
    return OverlongPenalty(settings.buffer, settings.penalty, config.rollout.max_response_tokens)


def _engines(config: Config, directory: Path, stack: ExitStack, finished: Callable[[], None]) -> RolloutFleet | Replay:
    if config.rollout.replay is None:
        cluster = _cluster(config)
        url = _sandbox_url(config, directory, stack) if needs_sandbox(config.rollout) else ""
        log.info("engines: vLLM's model runner %s", config.rollout.engine.model_runner)
        private = capabilities().cuda and cluster is None
        placement = Placement.of(config, Job(world_size(), node_ranks())) if private else None
        fleet = RolloutFleet(
            config,
            config.model.path,
            config.run.seed,
            url,
            placement=placement,
            cluster=cluster,
            finished=finished,
        )
        stack.enter_context(fleet).start()
        return fleet
    recorded = trajectory_files(Path(config.rollout.replay))
    return Replay(
        lambda step: [trajectory_of(record) for record in read_trajectories(recorded[step])],
        config.rollout.max_quarantined,
        refills=config.rollout.uniform_groups == "refill",
    )


def _cluster(config: Config) -> ClusterConfig | None:
    """The Ray cluster to join, if there is one. Raises ConfigError when there should be."""
    if os.environ.get(ADDRESS):
        return config.cluster
    if config.cluster.nodes > 1:
        fix = "start the run with `ctpo launch`, or Ray on every node and export RAY_ADDRESS=HOST:PORT of its head"
        raise ConfigError([Problem("cluster.nodes", "but RAY_ADDRESS names no Ray cluster", fix, config.cluster.nodes)])
    return None


def _sandbox_url(config: Config, directory: Path, stack: ExitStack) -> str | None:
    """Address of the sandbox of all engines; None: every node has its own."""
    sandbox = config.sandbox
    if sandbox.url is not None:
        return sandbox.url
    if config.cluster.nodes > 1 or node_sandbox.VARIABLE in os.environ:
        return None
    server = start_server(
        slots=sandbox.slots,
        limits=Limits.of(sandbox),
        start_timeout_s=sandbox.start_timeout_s,
        require=sandbox.require,
        log_path=directory / "logs" / "sandbox.log",
    )
    return stack.enter_context(server).url
