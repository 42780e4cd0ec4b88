"""Checks of the token budgets and the engine against the model and the machine."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ctpo_megatron.config import (
    SHARE,
    CpuCache,
    DataConfig,
    EngineConfig,
    Problem,
    RolloutConfig,
    cache_bytes,
    free_memory,
    sequence_multiple,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.check import RunContext, failed

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

_ARGUMENT_CLASSES = ("EngineArgs", "AsyncEngineArgs")
_TRIED = frozenset({"enable_chunked_prefill", "enable_prefix_caching", "max_num_batched_tokens"})
"""Those that runs have been tried with. Others may undo what training relies on: log-probs, weight updates, seeds."""
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


def check_tokens(context: RunContext) -> Iterator[Problem]:
    """Prompt + response <= engine <= model, and every sequence fits into a micro-batch."""
    config = context.config
    yield from check_budget(context)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    cp = config.policy.context_parallel_size
    multiple = sequence_multiple(config.policy)
    padded = -(-longest // multiple) * multiple
    auto, chosen = config.policy.micro_batch_tokens == "auto", config.policy.chosen
    unknown = auto and context.cuda and chosen.gpu_gib is None  # it will follow from the GPU
    if chosen.micro_batch_tokens * cp < padded and not unknown:
        share = f" on {cp} context-parallel ranks" if cp > 1 else ""
        number = f"is {chosen.micro_batch_tokens:,}, which " if auto else ""
        message = f"{number}cannot hold the longest sequence{share}, {_budget(config.data, config.rollout)}"
        yield context.error("policy.micro_batch_tokens", message, f"set at least {-(-padded // cp)}")


def _budget(data: DataConfig, rollout: RolloutConfig) -> str:
    prompt, response = data.max_prompt_tokens, rollout.max_response_tokens
    return f"data.max_prompt_tokens ({prompt}) + rollout.max_response_tokens ({response}) = {prompt + response}"


def check_budget(context: RunContext) -> Iterator[Problem]:
    """Prompt + response <= engine <= model."""
    config, spec = context.config, context.spec
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest, engine = prompt + response, config.rollout.engine.max_model_len
    if longest > engine:
        message = f"is less than {_budget(config.data, config.rollout)}"
        yield context.error("rollout.engine.max_model_len", message, f"set at least {longest}")
    if spec is not None and engine > spec.max_position_embeddings:
        message = f"exceeds the model's max_position_embeddings ({spec.max_position_embeddings})"
        yield context.error(
            "rollout.engine.max_model_len", message, "shorten the token budgets, or scale the positions"
        )
    turn = config.rollout.max_turn_tokens
    if turn is not None and turn > response:
        message = f"never acts: rollout.max_response_tokens ({response}) is smaller"
        yield context.warning("rollout.max_turn_tokens", message)


def check_endpoint(context: RunContext) -> Iterator[Problem]:
    """An agent where there is an endpoint, and time for it."""
    rollout = context.config.rollout
    if rollout.environment.name != "endpoint":
        if rollout.endpoint.agent is not None:
            message = f"never acts: rollout.environment is {rollout.environment}"
            yield context.warning("rollout.endpoint.agent", message, "set rollout.environment: endpoint")
        return
    if rollout.endpoint.agent is None:
        message = "rollout.environment: endpoint needs the function that runs episodes"
        yield context.error("rollout.endpoint.agent", message, "write package.module:name (docs/agents.md)")
    if rollout.endpoint.timeout_s >= rollout.group_timeout_s:
        message = (
            f"is not below rollout.group_timeout_s ({rollout.group_timeout_s:g}), so no agent is named that is late"
        )
        yield context.error("rollout.endpoint.timeout_s", message, "lower it, or raise rollout.group_timeout_s")


def check_engine(context: RunContext) -> Iterator[Problem]:
    """vLLM: memory, precision, and extra arguments that would undo what the trainer relies on."""
    engine, spec = context.config.rollout.engine, context.spec
    if not context.cuda:
        yield from _cpu(context, engine)
    yield from _extra(engine)
    yield from _transport(context)
    if spec is None:
        return
    if spec.num_attention_heads % engine.tensor_parallel_size:
        message = f"does not divide the model's {spec.num_attention_heads} attention heads"
        yield context.error("rollout.engine.tensor_parallel_size", message)
    if not context.cuda and spec.head_dim not in _CPU_HEAD_SIZES:
        fix = f"it supports {', '.join(map(str, _CPU_HEAD_SIZES))}"
        yield context.error("model.path", f"head_dim {spec.head_dim} is unknown to vLLM's CPU attention", fix)
    yield from _cache(context, spec)
    yield from _precision(context)


def check_engine_starts(context: RunContext) -> list[Problem]:
    """The errors of `check_engine`: its warnings are about training."""
    return failed(check_engine(context))


def _cpu(context: RunContext, engine: EngineConfig) -> Iterator[Problem]:
    if context.spec is not None and engine.kv_cache_mb is None:
        cache = CpuCache.of(context.config, context.spec, free_memory())
        if cache.mb > cache.most_mb:
            message = f"one sequence of {cache.tokens:,} tokens needs {cache.mb:,} MiB; {SHARE:.0%} of the free memory"
            fix = "shorten rollout.engine.max_model_len, free memory, or give a size"
            yield context.error("rollout.engine.kv_cache_mb", f"{message} is {cache.most_mb:,} MiB an engine", fix)
    if engine.model_runner == "v2":
        yield context.error("rollout.engine.model_runner", "needs CUDA and Triton", "set v1")
    if engine.block_size is not None and engine.block_size % 32:
        yield context.error("rollout.engine.block_size", "must be a multiple of 32 without CUDA", "set 32")


def _extra(engine: EngineConfig) -> Iterator[Problem]:
    for name, value in engine.extra.items():
        if name in _OWNED:
            yield Problem(f"rollout.engine.extra.{name}", "is set elsewhere", f"use {_OWNED[name]}", value)
        elif name in _FIXED:
            yield Problem(f"rollout.engine.extra.{name}", f"is not for you to set: {_FIXED[name]}", "remove it", value)
        elif name in _RUNS_CODE and value:
            message, fix = f"runs code: {_RUNS_CODE[name]}", "use it for code that you have read or trust"
            yield Problem(f"rollout.engine.extra.{name}", message, fix, value, severity="warning")
        elif (names := _arguments_of_vllm()) and name not in names:
            near = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
            fix = f"did you mean {near[0]}?" if near else "`vllm serve --help=all` lists them"
            yield Problem(f"rollout.engine.extra.{name}", "vLLM has no such engine argument", fix, value)
        elif name not in _TRIED:
            fix = "compare mismatch/* of the first step with and without it"
            message = "was never tried in a run"
            yield Problem(f"rollout.engine.extra.{name}", message, fix, value, severity="warning")


@cache
def _arguments_of_vllm() -> frozenset[str]:
    """Names of the engine arguments of the installed vLLM; empty without one. To import it would take ten seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    tree = ast.parse(Path(spec.origin).with_name("engine").joinpath("arg_utils.py").read_text(encoding="utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in _ARGUMENT_CLASSES)
    fields = (line.target for of_class in classes for line in of_class.body if isinstance(line, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))


def _transport(context: RunContext) -> Iterator[Problem]:
    config = context.config
    chosen, shared = config.rollout.weights.transport, config.placement.mode == "colocated"
    key = "rollout.weights.transport"
    if chosen in ("nccl", "ipc") and not context.cuda:
        yield context.error(key, "needs CUDA", "set auto or tcp")
    elif chosen == "ipc" and not shared:
        yield context.error(key, "is for engines on the trainer's GPUs", "set nccl, or placement.mode: colocated")
    elif chosen == "nccl" and shared:
        yield context.error(key, "cannot join two processes on one GPU (placement.mode: colocated)", "set ipc")


def _cache(context: RunContext, spec: ModelSpec) -> Iterator[Problem]:
    """vLLM refuses to start when its cache cannot hold one sequence of max_model_len."""
    engine = context.config.rollout.engine
    if engine.kv_cache_mb is None:
        return
    per_token = cache_bytes(context.config, spec)
    needed = -(-per_token * engine.max_model_len // 2**20)
    if engine.kv_cache_mb < needed:
        message = f"cannot hold one sequence of {engine.max_model_len} tokens ({per_token} bytes each)"
        yield context.error("rollout.engine.kv_cache_mb", message, f"set at least {needed}")


def _precision(context: RunContext) -> Iterator[Problem]:
    config = context.config
    trainer, sampler = config.policy.dtype, config.engine_dtype
    limit = config.rollout.mismatch_limit
    if trainer != sampler:
        message = f"but the engine runs in {sampler} (rollout.engine.dtype): their log-probs will differ by rounding"
        yield context.warning("policy.dtype", message, "set rollout.engine.dtype: auto")
    coarsest = max((trainer, sampler), key=lambda dtype: _MISMATCH.get(dtype, 0.0))
    if limit is not None and limit < (rounding := _MISMATCH.get(coarsest, 0.0)):
        message = f"is within the rounding of {coarsest}: a healthy run may stop"
        yield context.warning("rollout.mismatch_limit", message, f"set {rounding} or more, or null")
