"""Checks across keys, the number of ranks, the model and the files: what would fail, or be silently wrong, later.

Settings of Megatron-Core that train wrongly without an error are refused by not being offered: `batch_p2p_comm`,
`overlap_p2p_comm`, `deallocate_pipeline_outputs`, `perform_initialization`, `expert_tensor_parallel_size`.
docs/parallelism.md says what each of them would do.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ctpo_megatron.config.checks.cluster import check_cluster
from ctpo_megatron.config.checks.directories import check_export, check_model_directory
from ctpo_megatron.config.checks.engine import check_budget, check_engine, check_tokens
from ctpo_megatron.config.checks.groups import check_groups
from ctpo_megatron.config.checks.objective import check_objective
from ctpo_megatron.config.checks.parallel import check_parallel
from ctpo_megatron.config.checks.placement import check_gpu_memory, check_placement
from ctpo_megatron.config.checks.protocol import check_protocol
from ctpo_megatron.config.checks.staleness import check_staleness
from ctpo_megatron.config.checks.state import check_checkpoints, check_replay
from ctpo_megatron.config.model_spec import PREPARED, spec_for, will_be_prepared
from ctpo_megatron.config.placement import Job
from ctpo_megatron.config.problems import ConfigError, Problem, error, warning
from ctpo_megatron.config.rollout_schema import COLDEST
from ctpo_megatron.config.schema import Config, OptimizerConfig
from ctpo_megatron.config.sources import Sources
from ctpo_megatron.config.task_schema import LONGEST_S
from ctpo_megatron.models import ModelSpec


def validate(
    config: Config,
    *,
    world_size: int,
    cuda: bool,
    sources: Sources | None = None,
    job: Job | None = None,
    gpu_gib: float | None = None,
    shapes: ModelSpec | None = None,
) -> list[Problem]:
    """Run every check; returns the warnings, raises ConfigError with all errors (and names file and line if it can).

    job: what is known of ranks and GPUs a node. gpu_gib: refuse what a GPU of that size cannot hold. shapes: of the
    model, where neither the model nor the prompt files are at hand; those are then left out.
    """
    found: list[Problem] = []
    spec = shapes
    try:
        spec = shapes or spec_for(config)
    except ConfigError as unreadable:
        found += unreadable.problems
    job = job or Job(world_size)
    found += check(config, world_size, spec, cuda=cuda, job=job, files=shapes is None)
    if cuda and gpu_gib is not None and spec is not None and not any(p.severity == "error" for p in found):
        found += check_gpu_memory(config, job, spec, gpu_gib=gpu_gib)
    placed = [place(problem, sources) for problem in found]
    errors = [problem for problem in placed if problem.severity == "error"]
    if errors:
        raise ConfigError(errors)
    return placed


def check(
    config: Config, world_size: int, spec: ModelSpec | None, *, cuda: bool, job: Job | None = None, files: bool = True
) -> list[Problem]:
    """All problems, errors and warnings; without the model's spec, or `files`, the checks that need them are left out.

    files: model and prompt files are at hand.
    """
    found = [
        *_run(config),
        *check_parallel(config.policy, world_size, spec, cuda=cuda),
        *_batch(config, world_size),
        *check_tokens(config, spec),
        *check_engine(config, spec, cuda=cuda),
        *check_placement(config, job or Job(world_size), cuda=cuda),
        *check_cluster(config),
        *check_protocol(config),
        *check_objective(config),
        *check_groups(config),
        *check_staleness(config),
        *_schedules(config),
        *_evaluation(config),
        *_deadlines(config),
        *(_files(config) if files else ()),
        *(check_model_directory(config, spec) if files else ()),
        *check_export(config),
        *check_checkpoints(config),
        *check_replay(config),
    ]
    return sorted(found, key=lambda problem: problem.severity)  # errors first


def validate_sampling(config: Config, *, cuda: bool, sources: Sources | None = None) -> list[Problem]:
    """As `validate`, of what an evaluation without a trainer needs."""
    found: list[Problem] = []
    try:
        spec = spec_for(config)
        engine = [problem for problem in check_engine(config, spec, cuda=cuda) if problem.severity == "error"]
        found += [*check_budget(config, spec), *engine, *check_model_directory(config, spec)]
    except ConfigError as unreadable:
        found += unreadable.problems
    found += [*check_cluster(config), *check_protocol(config), *_evaluation(config), *_deadlines(config)]
    placed = [place(problem, sources) for problem in found]
    if errors := [problem for problem in placed if problem.severity == "error"]:
        raise ConfigError(errors)
    return placed


def place(problem: Problem, sources: Sources | None) -> Problem:
    """The problem with the file and line that its key was written at, if the sources know."""
    if problem.where or sources is None or not problem.key:
        return problem
    keys = tuple(problem.key.split("."))
    whole = tuple(key for key in keys if not key.isdigit())  # a list on the command line has no places of its items
    return replace(problem, where=sources.where(keys) if sources.has(keys) or sources.has(whole) else "default")


def _run(config: Config) -> Iterator[Problem]:
    if config.run.resume and config.run.overwrite:
        yield error(config, "run.resume", "contradicts run.overwrite: true", "switch one of them off")
    if (deadline := config.run.deadline) is not None and not 0 < deadline - time.time() < LONGEST_S:
        message = "is in the past" if deadline <= time.time() else "is decades ahead"
        yield error(config, "run.deadline", message, "give seconds since the epoch, such as $(date -d +4hours +%s)")


def _batch(config: Config, world_size: int) -> Iterator[Problem]:
    rollout, policy = config.rollout, config.policy
    mini = policy.mini_batch_prompts
    if rollout.prompts_per_step % mini:
        fix = f"choose a divisor of rollout.prompts_per_step ({rollout.prompts_per_step})"
        yield error(config, "policy.mini_batch_prompts", "does not divide the batch", fix)
    ranks = policy.tensor_model_parallel_size * policy.pipeline_model_parallel_size * policy.context_parallel_size
    if world_size % ranks == 0:
        data_parallel = world_size // ranks
        sequences = mini * rollout.samples_per_prompt
        if sequences % data_parallel:
            message = f"x {rollout.samples_per_prompt} samples = {sequences} sequences cannot be shared evenly"
            fix = f"make it divisible by the {data_parallel} data-parallel ranks"
            yield error(config, "policy.mini_batch_prompts", message, fix)
        if config.sft and config.sft.conversations_per_step % data_parallel:
            fix = f"make it a multiple of the {data_parallel} data-parallel ranks"
            yield error(config, "sft.conversations_per_step", "cannot be shared evenly", fix)
    if rollout.prompts_per_step == mini and config.objective.anchor != "behaviour":
        message = "makes exactly one update per batch: the ratio is identically 1 and the clip never acts"
        fix = f"use a smaller divisor of rollout.prompts_per_step ({rollout.prompts_per_step}), or anchor: behaviour"
        yield warning(config, "policy.mini_batch_prompts", message, fix)


def _schedules(config: Config) -> Iterator[Problem]:
    updates = config.run.steps * max(1, config.rollout.prompts_per_step // config.policy.mini_batch_prompts)
    yield from _schedule(config, "policy.optimizer", config.policy.optimizer, updates)
    if config.sft:
        yield from _schedule(config, "sft.optimizer", config.sft.optimizer, config.sft.steps)


def _schedule(config: Config, key: str, optimizer: OptimizerConfig, steps: int) -> Iterator[Problem]:
    if optimizer.min_lr > optimizer.lr:
        yield error(config, f"{key}.min_lr", f"is above lr ({optimizer.lr:g})", "lower it")
    if steps and optimizer.warmup_steps >= steps:
        yield warning(config, f"{key}.warmup_steps", f"never reaches the full lr: there are {steps} optimizer steps")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield error(config, f"{key}.betas", f"item {index} must be in [0, 1)")


def _evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.eval
    if not config.data.eval:
        if evaluation.every:
            yield error(config, "eval.every", "there is nothing to evaluate on", "give data.eval, or set it to 0")
        elif evaluation.prompts is not None:
            yield warning(config, "eval.prompts", "has no effect without data.eval")
    training = {Path(file).resolve() for file in config.data.train}
    if both := [file for file in config.data.eval if Path(file).resolve() in training]:
        message = "is training data too: the accuracy there says nothing about other problems"
        yield Problem("data.eval", message, "give held-out prompts", ", ".join(both), severity="warning")
    if 0 < evaluation.temperature < COLDEST:
        fix = f"set 0 for greedy decoding, or at least {COLDEST:g}"
        yield error(config, "eval.temperature", f"the engine would sample at {COLDEST:g} instead", fix)
    if evaluation.temperature == 0 and evaluation.samples > 1:
        fix = "set eval.temperature above 0, or samples to 1"
        yield warning(config, "eval.samples", "greedy decoding gives the same answer every time", fix)


def _deadlines(config: Config) -> Iterator[Problem]:
    sandbox = config.sandbox
    if sandbox.request_timeout_s <= sandbox.run_timeout_s:
        message = f"must exceed sandbox.run_timeout_s ({sandbox.run_timeout_s:g})"
        yield error(config, "sandbox.request_timeout_s", message, "queueing and start-up come on top of the execution")
    if config.rollout.group_timeout_s <= sandbox.request_timeout_s:
        allowed = f"{sandbox.request_timeout_s:g} s allowed"
        message = f"one slow tool call ({allowed}) makes the whole group time out, and it is sampled again"
        yield warning(config, "rollout.group_timeout_s", message, "raise it above sandbox.request_timeout_s")


def _files(config: Config) -> Iterator[Problem]:
    """Prompt files that are neither there nor going to be written by `prepare`."""
    wanted: list[tuple[str, Iterable[str]]] = [("data.train", config.data.train), ("data.eval", config.data.eval)]
    if config.sft:
        wanted.append(("sft.data", config.sft.data))
    for key, files in wanted:
        for file in files:
            if not will_be_prepared(config, Path(file)) and not Path(file).exists() and not glob.has_magic(file):
                yield Problem(key, "no such file", _file_hint(config, Path(file)), file)


def _file_hint(config: Config, file: Path) -> str:
    if config.prepare and file.absolute().is_relative_to(Path(config.prepare.directory).absolute()):
        return f"`prepare` writes {', '.join(PREPARED[1:])} there"
    if str(file).count("/") == 1 and not file.parent.exists():
        return f"a data set of the Hub first: hf download {file} --repo-type dataset --local-dir DIRECTORY"
    return "give the path of a data file, or of a folder of them (docs/data.md)"
