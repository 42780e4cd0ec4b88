"""The checks of a configuration, chosen for training or for sampling alone: what would fail, or be wrong, later.

Settings of Megatron-Core that train wrongly without an error are refused by not being offered: `batch_p2p_comm`,
`overlap_p2p_comm`, `deallocate_pipeline_outputs`, `perform_initialization`, `expert_tensor_parallel_size`.
docs/config.md says what each of them would do.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from dataclasses import replace

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.base.text import conceals
from ctpo_megatron.config import (
    COLDEST,
    ELEMENT_BYTES,
    LONGEST_S,
    Config,
    ConfigError,
    Job,
    OptimizerConfig,
    Problem,
    Sources,
    against_shared_prefixes,
    check_parallel,
    flattened,
    gib,
    needs_engines,
    sequence_multiple,
    spec_for,
)
from ctpo_megatron.data import resolved_files
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.check import Check, RunContext, failed, run_checks, warnings_of
from ctpo_megatron.preflight.choice import settled
from ctpo_megatron.preflight.engine import check_budget, check_endpoint, check_engine, check_engine_starts, check_tokens
from ctpo_megatron.preflight.files import (
    check_checkpoints,
    check_export,
    check_model_directory,
    check_prompt_files,
    check_replay,
)
from ctpo_megatron.preflight.objective import check_groups, check_objective
from ctpo_megatron.preflight.placement import check_gpu_memory, check_placement
from ctpo_megatron.preflight.programs import check_programs
from ctpo_megatron.preflight.template import check_protocol


def validate(
    config: Config,
    job: Job,
    *,
    cuda: bool,
    sources: Sources | None = None,
    gpu_gib: float | None = None,
    shapes: ModelSpec | None = None,
) -> list[Problem]:
    """Run the checks of training; returns the warnings, with file and line if `sources` know them.

    gpu_gib: refuse what a GPU of that size cannot hold. shapes: of the model, where neither the model nor the prompt
    files are there; checks of those are left out. Raises ConfigError with all errors.
    """
    spec, problems = (shapes, []) if shapes else _spec(config)
    context = RunContext(config, spec, job, cuda, gpu_gib if cuda else None)
    problems += check_training(context, files=shapes is None)
    if not failed(problems):  # its arithmetic needs a layout that fits ranks and model
        problems += _gpu_memory(context)
    return warnings_of(problems, sources)


def _gpu_memory(context: RunContext) -> Iterator[Problem]:
    """Of a configuration whose `auto` is chosen for the GPU."""
    if context.spec is not None and context.gpu_gib is not None:
        config = settled(context.config, context.job, context.spec, context.gpu_gib)
        yield from check_gpu_memory(replace(context, config=config))


def check_training(context: RunContext, *, files: bool = True) -> list[Problem]:
    """What the checks of training find, errors first. files: model and prompt files are there."""
    checks = [check for check in TRAINING if files or check not in FILES]
    # In the order of the alphabet: error, missing, warning.
    return sorted(run_checks(checks, context), key=lambda problem: problem.severity)


def validate_sampling(config: Config, *, cuda: bool, sources: Sources | None = None) -> list[Problem]:
    """As `validate`, of what an evaluation without a trainer needs."""
    spec, problems = _spec(config)
    context = RunContext(config, spec, cuda=cuda)
    if spec is not None:
        problems += run_checks(ENGINE, context)
    return warnings_of([*problems, *run_checks(SAMPLING, context)], sources)


def _spec(config: Config) -> tuple[ModelSpec | None, list[Problem]]:
    """The model's, or why it cannot be read."""
    try:
        return spec_for(config), []
    except ConfigError as unreadable:
        return None, [*unreadable.problems]


def check_layout(context: RunContext) -> Iterator[Problem]:
    """The parallel layout against the ranks and the model."""
    return check_parallel(context.config.policy, context.job.world_size, context.spec, cuda=context.cuda)


def check_attention(context: RunContext) -> Iterator[Problem]:
    """Context parallelism in local layers: whole keys and values on every rank, and a mask that is not in the plan."""
    policy, spec = context.config.policy, context.spec
    if not context.cuda or policy.context_parallel_size == 1 or not (why := _why_local(context.config)):
        return
    longest = context.config.data.max_prompt_tokens + context.config.rollout.max_response_tokens
    longest = -(-longest // sequence_multiple(policy)) * sequence_multiple(policy)
    element = ELEMENT_BYTES[policy.dtype]
    mask = longest // policy.context_parallel_size * longest * (1 + element)  # of booleans, and added to the scores
    held = f"a mask of {gib(mask)} for a sequence of {longest:,} tokens"
    if spec is not None:
        heads = spec.num_attention_heads if policy.dtype == "float32" else spec.num_key_value_heads
        kept = 2 * heads * spec.head_dim * element * longest // policy.tensor_model_parallel_size
        held += f", and in each layer all its keys and values, {gib(kept)}"
    message = f"without Transformer Engine's layers ({why}) every rank holds {held}: not in the memory plan"
    yield context.warning("policy.context_parallel_size", message, _remedy(context.config))


def _why_local(config: Config) -> str:
    """Why the layers are local; empty where they are Transformer Engine's, as far as this machine shows."""
    policy = config.policy
    if policy.layer_spec == "local" or policy.dtype == "float32":
        return "policy.layer_spec: local" if policy.layer_spec == "local" else "policy.dtype: float32"
    if policy.layer_spec == "auto" and (te_trouble() or not is_installed(TE)):
        return "it is not installed here"
    return ""


def prefix_note(config: Config, *, cuda: bool) -> str:
    """Whether passes compute tokens with the same history once, as far as this machine shows, and why not."""
    if against := against_shared_prefixes(config.policy):
        return f"not shared: {against}"
    whole_attention = ", in attention for each sequence" if cuda and not _why_local(config) else ""
    return f"tokens with the same history are computed once{whole_attention}"


def _remedy(config: Config) -> str:
    policy = config.policy
    settings = ["policy.dtype: bfloat16"] if policy.dtype == "float32" else []
    settings += ["policy.layer_spec: auto"] if policy.layer_spec != "auto" else []
    return " and ".join(["install it (docs/install_cuda.md)", *settings]) + ", or split by tensor parallelism"


def check_router_replay(context: RunContext) -> Iterator[Problem]:
    """Whether engines can report experts, and what a mixture risks without; `check_parallel` looks at the model."""
    spec, config = context.spec, context.config
    if spec is None or spec.num_experts_per_token < 2:  # of one expert a token nothing can be recorded
        return
    if not config.policy.router_replay:
        message = (
            "is off, and the model is a mixture of experts: sampler and trainer choose differently where two experts "
            "are nearly level, and their log-probs are then of different experts (docs/moe.md)"
        )
        yield context.warning(
            "policy.router_replay",
            message,
            f"set true{', and rollout.engine.model_runner: v2' if context.cuda else ''}",
        )
    elif needs_engines(config):
        yield from _experts_of_engines(context)


def _experts_of_engines(context: RunContext) -> Iterator[Problem]:
    engine = context.config.rollout.engine
    if not context.cuda:
        if engine.tensor_parallel_size > 1:
            message = "needs engines of one worker on a CPU: the experts of several cannot be read"
            yield context.error("policy.router_replay", message, "set rollout.engine.tensor_parallel_size: 1")
        return
    if engine.model_runner != "v2":
        message = "reports no experts, which policy.router_replay needs"
        yield context.error("rollout.engine.model_runner", message, "set v2, or policy.router_replay: false")
    if engine.extra.get("enable_prefix_caching") is False:
        message = "must stay on with policy.router_replay: vLLM keeps the experts of tokens with its cache"
        yield Problem("rollout.engine.extra.enable_prefix_caching", message, "remove it", False)


def check_concealed(context: RunContext) -> Iterator[Problem]:
    """Values that a run's config.yaml does not tell; there they are known by `redact.conceals`."""
    for key, value in flattened(context.config.model_dump(mode="json")):
        if conceals(value):
            message = "was a secret, which config.yaml of a run does not contain"
            yield Problem(key, message, f"give it again: {key}=...", value)


def check_run(context: RunContext) -> Iterator[Problem]:
    config = context.config
    if config.run.resume and config.run.overwrite:
        yield context.error("run.resume", "contradicts run.overwrite: true", "switch one of them off")
    if (deadline := config.run.deadline) is not None and not 0 < deadline - time.time() < LONGEST_S:
        message = "is in the past" if deadline <= time.time() else "is decades ahead"
        yield context.error("run.deadline", message, "give seconds since the epoch, such as $(date -d +4hours +%s)")

    if never := [str(step) for step in config.run.profile_steps if step > config.run.steps]:
        message = f"names steps that are never made: {', '.join(never)} of {config.run.steps} (run.steps)"
        yield context.warning("run.profile_steps", message, "remove them: no trace is written")


def check_batch(context: RunContext) -> Iterator[Problem]:
    config = context.config
    rollout, policy, world_size = config.rollout, config.policy, context.job.world_size
    mini = policy.mini_batch_prompts
    if rollout.prompts_per_step % mini:
        fix = f"choose a divisor of rollout.prompts_per_step ({rollout.prompts_per_step})"
        yield context.error("policy.mini_batch_prompts", "does not divide the batch", fix)
    ranks = policy.tensor_model_parallel_size * policy.pipeline_model_parallel_size * policy.context_parallel_size
    if world_size % ranks == 0:
        data_parallel = world_size // ranks
        sequences = mini * rollout.samples_per_prompt
        if sequences % data_parallel:
            message = f"x {rollout.samples_per_prompt} samples = {sequences} sequences cannot be shared evenly"
            fix = f"make it divisible by the {data_parallel} data-parallel ranks"
            yield context.error("policy.mini_batch_prompts", message, fix)
        if config.sft and config.sft.conversations_per_step % data_parallel:
            fix = f"make it a multiple of the {data_parallel} data-parallel ranks"
            yield context.error("sft.conversations_per_step", "cannot be shared evenly", fix)
    if rollout.prompts_per_step == mini and policy.passes_per_batch == 1 and config.objective.anchor != "behaviour":
        message = "makes exactly one update per batch: the ratio is identically 1 and the clip never acts"
        fix = (
            f"use a smaller divisor of rollout.prompts_per_step ({rollout.prompts_per_step}), more "
            "policy.passes_per_batch, or anchor: behaviour"
        )
        yield context.warning("policy.mini_batch_prompts", message, fix)


def check_schedules(context: RunContext) -> Iterator[Problem]:
    config = context.config
    policy = config.policy
    updates = max(1, config.rollout.prompts_per_step // policy.mini_batch_prompts) * policy.passes_per_batch
    yield from _schedule(context, "policy.optimizer", policy.optimizer, config.run.steps * updates)
    if (sft := config.sft) is not None:
        yield from _schedule(context, "sft.optimizer", sft.optimizer, sft.steps)


def _schedule(context: RunContext, key: str, optimizer: OptimizerConfig, steps: int) -> Iterator[Problem]:
    if optimizer.min_lr > optimizer.lr:
        yield context.error(f"{key}.min_lr", f"is above lr ({optimizer.lr:g})", "lower it")
    if steps and optimizer.warmup_steps >= steps:
        message = f"never reaches the full lr: there are {steps} optimizer steps"
        yield context.warning(f"{key}.warmup_steps", message, "lower it")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield context.error(f"{key}.betas", f"item {index} must be in [0, 1)", "the usual values are [0.9, 0.95]")


def check_evaluation(context: RunContext) -> Iterator[Problem]:
    config = context.config
    evaluation = config.eval
    if not config.data.eval:
        if evaluation.every:
            yield context.error("eval.every", "there is nothing to evaluate on", "give data.eval, or set it to 0")
        elif evaluation.prompts is not None:
            yield context.warning("eval.prompts", "has no effect without data.eval", "give data.eval, or remove it")
    training = resolved_files(config.data.train_files)
    if both := [file for file in config.data.eval if training & resolved_files([file])]:
        message = "is training data too: the accuracy there says nothing about other problems"
        yield Problem("data.eval", message, "give held-out prompts", ", ".join(both), severity="warning")
    if 0 < evaluation.temperature < COLDEST:
        fix = f"set 0 for greedy decoding, or at least {COLDEST:g}"
        yield context.error("eval.temperature", f"the engine would sample at {COLDEST:g} instead", fix)
    if evaluation.temperature == 0 and evaluation.samples > 1:
        fix = "set eval.temperature above 0, or samples to 1"
        yield context.warning("eval.samples", "greedy decoding gives the same answer every time", fix)


def check_deadlines(context: RunContext) -> Iterator[Problem]:
    config = context.config
    sandbox = config.sandbox
    if sandbox.request_timeout_s <= sandbox.run_timeout_s:
        message = f"must exceed sandbox.run_timeout_s ({sandbox.run_timeout_s:g})"
        enough = f"queueing and start-up come on top of the execution: set {10 * sandbox.run_timeout_s:g} or more"
        yield context.error("sandbox.request_timeout_s", message, enough)
    if config.rollout.group_timeout_s <= sandbox.request_timeout_s:
        allowed = f"{sandbox.request_timeout_s:g} s allowed"
        message = f"one slow tool call ({allowed}) makes the whole group time out, and it is sampled again"
        yield context.warning("rollout.group_timeout_s", message, "raise it above sandbox.request_timeout_s")


def check_cluster(context: RunContext) -> Iterator[Problem]:
    """An address that is none."""
    config = context.config
    address = config.cluster.node_address
    if address is None:
        return
    try:
        ipaddress.ip_address(address)
    except ValueError:
        fix = "give the address that Ray was started with here (ray start --node-ip-address), or null"
        yield context.error("cluster.node_address", "is no IP address", fix)


def check_staleness(context: RunContext) -> Iterator[Problem]:
    """Both sides have to work at once, and what is sampled must come from engines."""
    config = context.config
    rollout = config.rollout
    if not rollout.ahead:
        if rollout.partial == "finish":
            message = "has no effect: with rollout.max_staleness: 0 nothing is in flight when weights change"
            yield context.warning("rollout.partial", message, "leave it out, or raise rollout.max_staleness")
        return
    key = "rollout.lag" if rollout.lag else "rollout.max_staleness"
    if rollout.lag and rollout.max_staleness:
        message = "samples ahead whatever is done first, and rollout.lag at fixed steps"
        yield context.error("rollout.max_staleness", message, "set one of them to 0")
    if rollout.lag and rollout.oversample:
        message = "keeps the groups that are complete first, so that timing decides, which rollout.lag rules out"
        yield context.error("rollout.oversample", message, "set it or rollout.lag to 0")
    if config.objective.anchor == "proximal":
        message = f"is biased for stale data ({key}): it lacks what updates since its sampling changed"
        yield context.warning("objective.anchor", message, "leave it out, which takes behaviour, or set decoupled")
    if config.placement.mode == "colocated":
        message = "needs engines that sample while the trainer works; those on its GPUs (placement.mode) sleep then"
        yield context.error(key, message, "set 0, or placement.mode: disaggregated")
    if rollout.replay is not None:
        message = "is for engines; what rollout.replay has recorded has the versions that it was recorded with"
        fix = "set 0; for a recording that is stale, set objective.anchor: behaviour, too"
        yield context.error(key, message, fix)


FILES: tuple[Check[RunContext], ...] = (check_prompt_files, check_model_directory)
TRAINING: tuple[Check[RunContext], ...] = (
    check_concealed,
    check_run,
    check_layout,
    check_attention,
    check_batch,
    check_tokens,
    check_engine,
    check_endpoint,
    check_router_replay,
    check_placement,
    check_cluster,
    check_protocol,
    check_objective,
    check_groups,
    check_staleness,
    check_schedules,
    check_evaluation,
    check_deadlines,
    *FILES,
    check_programs,
    check_export,
    check_checkpoints,
    check_replay,
)
ENGINE: tuple[Check[RunContext], ...] = (check_budget, check_engine_starts, check_model_directory)
SAMPLING: tuple[Check[RunContext], ...] = (
    check_concealed,
    check_cluster,
    check_protocol,
    check_endpoint,
    check_evaluation,
    check_deadlines,
    check_programs,
)
