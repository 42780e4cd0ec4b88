"""Rules of sampling: token budgets, engines and their GPUs, tools and their sandbox, deadlines, staleness."""

from __future__ import annotations

import glob
import ipaddress
from collections.abc import Callable, Iterable, Iterator

from ctpo_megatron.config.data_schema import DataConfig
from ctpo_megatron.config.placement import Job, Placement, needs_engines, sequence_multiple
from ctpo_megatron.config.problems import Problem, error, failed, warning
from ctpo_megatron.config.rollout_schema import EngineConfig, RolloutConfig
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.texts import chat_template_names, chat_template_text, system_prompt_text
from ctpo_megatron.models import ModelSpec
from ctpo_sandbox.isolation.readable import readable_above
from ctpo_sandbox.records import Limits

_MISMATCH = {"bfloat16": 0.05, "float16": 0.01}
"""Sampler and trainer in bfloat16 differ by up to 0.011 on a tiny random model; trained ones show more. float16 has
three more bits."""

# vLLM's own names of what the schema sets, or what the trainer relies on.
_OWNED = {
    "model": "model.path",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_mb",
    "enable_return_routed_experts": "policy.router_replay",
    "seed": "run.seed",
    **{name: f"rollout.engine.{name}" for name in EngineConfig.model_fields if name != "extra"},
}
_FIXED = {
    "logprobs_mode": "the trainer needs the log-probs of the distribution sampled from",
    "worker_extension_cls": "the weight synchronization uses it",
    "enable_sleep_mode": "placement.mode decides",
    "weight_transfer_config": "the weight synchronization uses it",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "pipeline_parallel_size": "the weight synchronization expects one stage",
    "quantization": "synchronized weights are not quantized",
}

_RUNS_CODE = {
    "trust_remote_code": "Python files in the model's directory",
    "worker_cls": "a class instead of vLLM's worker",
    "scheduler_cls": "a class instead of vLLM's scheduler",
    "logits_processors": "classes that are imported by name",
    "io_processor_plugin": "a plugin of vLLM",
    "model_class_overrides": "classes that are imported by name",
    "reasoning_parser_plugin": "a file of Python",
}
"""vLLM's arguments that name code, or a place of code."""

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32's CPU attention kernels; with another size the engine dies at its first request."""


def check_tokens(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Prompt + response <= engine <= model, and every sequence fits into a micro-batch."""
    yield from check_budget(config, model, job)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    cp = config.policy.context_parallel_size
    multiple = sequence_multiple(config.policy)
    padded = -(-longest // multiple) * multiple
    auto, chosen = config.policy.micro_batch_tokens == "auto", config.policy.chosen
    unknown = auto and job.cuda and chosen.gpu_gib is None  # it will follow from the GPU
    if chosen.micro_batch_tokens * cp < padded and not unknown:
        share = f" on {cp} context-parallel ranks" if cp > 1 else ""
        number = f"is {chosen.micro_batch_tokens:,}, which " if auto else ""
        message = f"{number}cannot hold the longest sequence{share}, {_budget(config.data, config.rollout)}"
        yield error(config, "policy.micro_batch_tokens", message, f"set at least {-(-padded // cp)}")


def _budget(data: DataConfig, rollout: RolloutConfig) -> str:
    prompt, response = data.max_prompt_tokens, rollout.max_response_tokens
    return f"data.max_prompt_tokens ({prompt}) + rollout.max_response_tokens ({response}) = {prompt + response}"


def check_budget(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Prompt + response <= engine <= model."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest, engine = prompt + response, config.rollout.engine.max_model_len
    if longest > engine:
        message = f"is less than {_budget(config.data, config.rollout)}"
        yield error(config, "rollout.engine.max_model_len", message, f"set at least {longest}")
    if model is not None and engine > model.max_position_embeddings:
        message = f"exceeds the model's max_position_embeddings ({model.max_position_embeddings})"
        yield error(
            config, "rollout.engine.max_model_len", message, "shorten the token budgets, or scale the positions"
        )
    turn = config.rollout.max_turn_tokens
    if turn is not None and turn > response:
        message = f"never acts: rollout.max_response_tokens ({response}) is smaller"
        yield warning(config, "rollout.max_turn_tokens", message)


def check_endpoint(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Require an agent where there is an endpoint, and time for it."""
    rollout = config.rollout
    if rollout.environment.name != "endpoint":
        if rollout.endpoint.agent is not None:
            message = f"never acts: rollout.environment is {rollout.environment}"
            yield warning(config, "rollout.endpoint.agent", message, "set rollout.environment: endpoint")
        return
    if rollout.endpoint.agent is None:
        message = "rollout.environment: endpoint needs the function that runs episodes"
        yield error(config, "rollout.endpoint.agent", message, "write package.module:name (docs/agents.md)")
    if rollout.endpoint.timeout_s >= rollout.group_timeout_s:
        message = (
            f"is not below rollout.group_timeout_s ({rollout.group_timeout_s:g}), so no agent is named that is late"
        )
        yield error(config, "rollout.endpoint.timeout_s", message, "lower it, or raise rollout.group_timeout_s")


def check_engine(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """vLLM: sizes, precision, and extra arguments that would undo what the trainer relies on."""
    engine = config.rollout.engine
    if not job.cuda:
        yield from _cpu(config)
    yield from _extra(engine)
    yield from _transport(config, job)
    if model is None:
        return
    if model.num_attention_heads % engine.tensor_parallel_size:
        message = f"does not divide the model's {model.num_attention_heads} attention heads"
        yield error(config, "rollout.engine.tensor_parallel_size", message)
    if not job.cuda and model.head_dim not in _CPU_HEAD_SIZES:
        fix = f"it supports {', '.join(map(str, _CPU_HEAD_SIZES))}"
        yield error(config, "model.path", f"head_dim {model.head_dim} is unknown to vLLM's CPU attention", fix)
    yield from _precision(config)


def check_engine_starts(config: Config, model: ModelSpec | None, job: Job) -> list[Problem]:
    """Return the errors of `check_engine`: its warnings are about training."""
    return failed(check_engine(config, model, job))


def _cpu(config: Config) -> Iterator[Problem]:
    engine = config.rollout.engine
    if engine.model_runner == "v2":
        yield error(config, "rollout.engine.model_runner", "needs CUDA and Triton", "set v1")
    if engine.block_size is not None and engine.block_size % 32:
        yield error(config, "rollout.engine.block_size", "must be a multiple of 32 without CUDA", "set 32")


def _extra(engine: EngineConfig) -> Iterator[Problem]:
    for name, value in engine.extra.items():
        if name in _OWNED:
            yield Problem(f"rollout.engine.extra.{name}", "is set elsewhere", f"use {_OWNED[name]}", value)
        elif name in _FIXED:
            yield Problem(f"rollout.engine.extra.{name}", f"is not for you to set: {_FIXED[name]}", "remove it", value)
        elif name in _RUNS_CODE and value:
            message, fix = f"runs code: {_RUNS_CODE[name]}", "use it for code that you have read or trust"
            yield Problem(f"rollout.engine.extra.{name}", message, fix, value, severity="warning")


def _transport(config: Config, job: Job) -> Iterator[Problem]:
    chosen, shared = config.rollout.weights.transport, config.placement.mode == "colocated"
    key = "rollout.weights.transport"
    if chosen in ("nccl", "ipc") and not job.cuda:
        yield error(config, key, "needs CUDA", "set auto or tcp")
    elif chosen == "ipc" and not shared:
        yield error(config, key, "is for engines on the trainer's GPUs", "set nccl, or placement.mode: colocated")
    elif chosen == "nccl" and shared:
        yield error(config, key, "cannot join two processes on one GPU (placement.mode: colocated)", "set ipc")


def _precision(config: Config) -> Iterator[Problem]:
    trainer, sampler = config.policy.dtype, config.engine_dtype
    limit = config.rollout.mismatch_limit
    if trainer != sampler:
        message = f"but the engine runs in {sampler} (rollout.engine.dtype): their log-probs will differ by rounding"
        yield warning(config, "policy.dtype", message, "set rollout.engine.dtype: auto")
    coarsest = max((trainer, sampler), key=lambda dtype: _MISMATCH.get(dtype, 0.0))
    if limit is not None and limit < (rounding := _MISMATCH.get(coarsest, 0.0)):
        message = f"is within the rounding of {coarsest}: a healthy run may stop"
        yield warning(config, "rollout.mismatch_limit", message, f"set {rounding} or more, or null")


def check_deadlines(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    sandbox = config.sandbox
    if sandbox.request_timeout_s <= sandbox.run_timeout_s:
        message = f"must exceed sandbox.run_timeout_s ({sandbox.run_timeout_s:g})"
        enough = f"queueing and start-up come on top of the execution: set {10 * sandbox.run_timeout_s:g} or more"
        yield error(config, "sandbox.request_timeout_s", message, enough)
    if config.rollout.group_timeout_s <= sandbox.request_timeout_s:
        allowed = f"{sandbox.request_timeout_s:g} s allowed"
        message = f"one slow tool call ({allowed}) makes the whole group time out, and it is sampled again"
        yield warning(config, "rollout.group_timeout_s", message, "raise it above sandbox.request_timeout_s")


def check_cluster(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Refuse an invalid address."""
    address = config.cluster.node_address
    if address is None:
        return
    try:
        ipaddress.ip_address(address)
    except ValueError:
        fix = "give the address that Ray was started with here (ray start --node-ip-address), or null"
        yield error(config, "cluster.node_address", "is no IP address", fix)


def check_staleness(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Both sides have to work at once, and what is sampled must come from engines."""
    rollout = config.rollout
    if not rollout.ahead:
        if rollout.partial == "finish":
            message = "has no effect: with rollout.max_staleness: 0 nothing is in flight when weights change"
            yield warning(config, "rollout.partial", message, "leave it out, or raise rollout.max_staleness")
        return
    key = "rollout.lag" if rollout.lag else "rollout.max_staleness"
    if rollout.lag and rollout.max_staleness:
        message = "samples ahead whatever is done first, and rollout.lag at fixed steps"
        yield error(config, "rollout.max_staleness", message, "set one of them to 0")
    if rollout.lag and rollout.oversample:
        message = "keeps the groups that are complete first, so that timing decides, which rollout.lag rules out"
        yield error(config, "rollout.oversample", message, "set it or rollout.lag to 0")
    if config.objective.anchor == "proximal":
        message = f"is biased for stale data ({key}): it lacks what updates since its sampling changed"
        yield warning(config, "objective.anchor", message, "leave it out, which takes behaviour, or set decoupled")
    if config.placement.mode == "colocated":
        message = "needs engines that sample while the trainer works; those on its GPUs (placement.mode) sleep then"
        yield error(config, key, message, "set 0, or placement.mode: disaggregated")
    if rollout.replay is not None:
        message = "is for engines; what rollout.replay has recorded has the versions that it was recorded with"
        fix = "set 0; for a recording that is stale, set objective.anchor: behaviour, too"
        yield error(config, key, message, fix)


def check_protocol(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Check that the protocol `fenced` has one tool and no schemas; tools can run; chat template and system prompt
    can be read.
    """
    template, prompt = config.model.chat_template, config.data.system_prompt
    if template is not None and (reason := _unreadable(chat_template_text, template)):
        fix = f"write {', '.join(chat_template_names())}, or the path of a file that ends in .jinja"
        yield error(config, "model.chat_template", f"cannot be read: {reason}", fix)
    if config.rollout.tool_parser.name == "fenced":
        yield from _fenced(config)
    if config.rollout.tools and not config.rollout.can_call_tools:
        tools = ", ".join(map(str, config.rollout.tools))
        message = f"is the last turn, which may not call: the tools ({tools}) are offered and can never run"
        yield warning(config, "rollout.max_turns", message, "raise it, or set rollout.tools: []")
    for name in ("max_tool_calls", "max_tool_s"):
        if getattr(config.rollout, name) is not None and not config.rollout.tools:
            message = "limits calls, and rollout.tools is empty"
            yield error(config, f"rollout.{name}", message, "set null, or give tools")
    if prompt is not None and (reason := _unreadable(system_prompt_text, prompt)):
        message = f"is the name of a file that cannot be read: {reason}"
        yield error(config, "data.system_prompt", message, "give a file's path, or the text itself")


def _unreadable(read: Callable[[str], object], value: str) -> str:
    """Why the text that `value` names cannot be read; empty if it can."""
    try:
        read(value)
    except (OSError, UnicodeDecodeError) as failure:
        return getattr(failure, "strerror", None) or "is not UTF-8"
    return ""


def _fenced(config: Config) -> Iterator[Problem]:
    key, tools = "rollout.tool_parser", config.rollout.tools
    if len(tools) != 1:
        named = ", ".join(map(str, tools)) or "none"
        message = f"runs programs with one tool, and rollout.tools has {len(tools)} ({named}): a block names no tool"
        yield Problem(key, message, "set rollout.tools: [python], or rollout.tool_parser: hermes", "fenced")
    if config.data.tool_in_prompt:
        message = "shows the model a way to call tools that rollout.tool_parser: fenced does not read"
        yield error(config, "data.tool_in_prompt", message, "leave it out, or set rollout.tool_parser: hermes")


def check_placement(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Numbers of GPUs that contradict each other, the job or the node."""
    if not job.cuda:
        if config.placement.mode == "colocated":
            yield error(config, "placement.mode", "engines sleep on CUDA only", "set disaggregated")
        return
    yield from _gpus_of_ranks(config, job)
    if needs_engines(config):
        yield from _gpus_of_engines(config, job)


def _gpus_of_ranks(config: Config, job: Job) -> Iterator[Problem]:
    """Whether as many trainer ranks run as the configuration has GPUs for."""
    nodes, wanted = config.cluster.nodes, config.placement.trainer_gpus
    of_node = wanted or job.node_ranks
    if wanted is not None and job.node_ranks not in (None, wanted):
        message = f"but {job.node_ranks} trainer ranks run here"
    elif of_node is not None and job.node_ranks == of_node and job.world_size != of_node * nodes:
        message = f"but {job.world_size} trainer ranks, {of_node} a node, run on other than {nodes} nodes"
        yield error(config, "cluster.nodes", message, f"start torchrun with --nnodes {nodes}, or correct cluster.nodes")
        return
    elif of_node is not None and job.world_size != of_node * nodes:
        where = "here" if nodes == 1 else f"on {nodes} nodes (cluster.nodes)"
        message = f"but {job.world_size} trainer ranks run {where}"
    else:
        return
    fix = f"start {of_node} ranks a node: torchrun --nproc-per-node {of_node} (a dry run needs no WORLD_SIZE)"
    yield error(config, "placement.trainer_gpus", message, fix)


def _gpus_of_engines(config: Config, job: Job) -> Iterator[Problem]:
    placed = Placement.of(config, job)
    placement, rollout = config.placement, config.rollout
    each, given, nodes = rollout.engine.tensor_parallel_size, placement.engine_gpus, config.cluster.nodes
    if given is None:
        if rollout.engines == "auto":
            yield error(config, "rollout.engines", "needs to know how many GPUs there are", "set placement.engine_gpus")
    elif given % each:
        message = f"cannot be distributed among engines of {each} GPUs"
        fix = "make it a multiple of rollout.engine.tensor_parallel_size"
        yield error(config, "placement.engine_gpus", message, fix)
    elif rollout.engines != "auto" and rollout.engines * each > given * nodes:
        message = f"x {each} GPUs each do not fit into placement.engine_gpus ({given}){_times(nodes)}"
        yield error(config, "rollout.engines", message, "set auto")
    elif rollout.engines != "auto" and rollout.engines * each < given * nodes:
        left = given * nodes - rollout.engines * each
        message = f"leaves {left} of placement.engine_gpus ({given}){_times(nodes)} without an engine"
        yield warning(config, "rollout.engines", message, "set auto")
    if placement.mode == "colocated" and len(placed.engines) > len(placed.trainer):
        message = f"but engines need {len(placed.engines)} GPUs, and the trainer has {len(placed.trainer)} to share"
        yield error(config, "placement.mode", message, "lower rollout.engines or placement.engine_gpus")
    elif job.node_gpus is not None and placed.gpus > job.node_gpus:
        sides = f"{len(placed.trainer)} for the trainer and {len(placed.engines)} for the engines"
        message = f"needs {placed.gpus} GPUs, {sides}, and this node shows {job.node_gpus}"
        yield error(config, "placement.mode", message, "start fewer trainer ranks, or set colocated")


def _times(nodes: int) -> str:
    return f" x cluster.nodes ({nodes})" if nodes > 1 else ""


def check_programs(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Programs cannot read data or what the run writes: ground truths are in both. All threads can have a stack."""
    if not config.rollout.needs_sandbox or not needs_engines(config):
        return
    secret: list[tuple[str, Iterable[str]]] = [
        ("data.train", config.data.train_files),
        ("data.eval", config.data.eval),
        ("sft.data", config.sft.data if config.sft else ()),
        ("run.root", [str(config.run.directory)]),
    ]
    for key, paths in secret:
        for path in paths:
            above = next(filter(None, map(readable_above, [path, *glob.glob(path)])), None)
            if above is not None:
                message = (
                    f"is below {above}, which programs in the sandbox may read: they could print the ground truths"
                )
                fix = "choose a folder outside of the system's and the environment's lib"
                yield Problem(key, message, fix, config.run.root if key == "run.root" else path)
    if why := Limits.of(config.sandbox).threads_too_many:
        yield error(config, "sandbox.threads", why)
