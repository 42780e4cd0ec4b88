"""Checks of the parallel layout, the token budgets and the engine against the model and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem, error, warning
from ctpo_megatron.config.schema import Config, EngineConfig, PolicyConfig
from ctpo_megatron.models import ModelSpec

_BFLOAT16_MISMATCH = 0.05
"""Sampler and trainer in bfloat16 differ by up to 0.011 on a tiny random model; trained ones show more."""

# vLLM's own names of what the schema sets, or what the trainer relies on.
_OWNED = {
    "model": "model.path",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_mb",
    "seed": "run.seed",
    **{name: f"rollout.engine.{name}" for name in EngineConfig.model_fields if name != "extra"},
}
_FIXED = {
    "logprobs_mode": "the trainer needs the log-probs of the distribution sampled from",
    "worker_extension_cls": "the weight synchronization uses it",
    "weight_transfer_config": "the weight synchronization uses it",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "pipeline_parallel_size": "the weight synchronization expects one stage",
    "quantization": "synchronized weights are not quantized",
}


NEED_TE = frozenset({"layernorm", "moe_act"})
"""Recompute modules that Megatron-Core offers with Transformer Engine's layers only."""

_OF_EXPERTS = frozenset({"moe", "moe_act", "layernorm"})
"""Recompute modules of layers with experts. Transformer Engine's dense layers fuse their norms with the projections:
there `layernorm` would do nothing."""

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM 0.32's CPU attention kernels; with another size the engine dies at its first request."""


def check_parallel(policy: PolicyConfig, world_size: int, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """Ranks, and the model's shape against the parallel layout."""
    yield from _ranks(policy, world_size)
    yield from _stages(policy, spec)
    yield from _memory(policy, spec, cuda=cuda)
    tp = policy.tensor_model_parallel_size
    if policy.sequence_parallel and tp == 1:
        fix = "switch it off, or raise policy.tensor_model_parallel_size"
        yield _error(policy, "sequence_parallel", "needs tensor parallelism", fix)
    if policy.overlap_param_gather and not (policy.use_distributed_optimizer and policy.overlap_grad_reduce):
        fix = "set both true, or this false"
        message = "needs policy.use_distributed_optimizer and policy.overlap_grad_reduce"
        yield _error(policy, "overlap_param_gather", message, fix)
    if policy.layer_spec == "transformer_engine":
        needs = {"CUDA": cuda, "policy.dtype: bfloat16 (packed attention)": policy.dtype == "bfloat16"}
        missing = [name for name, there in needs.items() if not there]
        if missing:
            message = f"Transformer Engine needs {' and '.join(missing)}"
            yield _error(policy, "layer_spec", message, "set auto or local")
    if spec is None:
        return
    for name, amount in (
        ("attention heads", spec.num_attention_heads),
        ("key/value heads", spec.num_key_value_heads),
        ("MLP channels", spec.moe_intermediate_size or spec.intermediate_size),
    ):
        if amount % tp:
            message = f"does not divide the model's {amount} {name}"
            yield _error(policy, "tensor_model_parallel_size", message)
    yield from _experts(policy, world_size, spec)


def sequence_multiple(policy: PolicyConfig) -> int:
    """What the length of every packed sequence is filled up to a multiple of: two equal pieces on each
    context-parallel rank, and `pad_to_multiple`."""
    pieces = 2 * policy.context_parallel_size if policy.context_parallel_size > 1 else 1
    return math.lcm(pieces, policy.pad_to_multiple)


def _error(policy: PolicyConfig, name: str, message: str, fix: str = "") -> Problem:
    return Problem(f"policy.{name}", message, fix, getattr(policy, name))


def _ranks(policy: PolicyConfig, world_size: int) -> Iterator[Problem]:
    tp, pp, cp = (
        policy.tensor_model_parallel_size,
        policy.pipeline_model_parallel_size,
        policy.context_parallel_size,
    )
    if world_size % (tp * pp * cp):
        others = f"pipeline_model_parallel_size {pp}" + (f" x context_parallel_size {cp}" if cp > 1 else "")
        message = f"x {others} = {tp * pp * cp} does not divide the world size {world_size}"
        fix = "start a multiple of that many ranks: torchrun --nproc-per-node N (for a dry run: WORLD_SIZE=N)"
        yield _error(policy, "tensor_model_parallel_size", message, fix)
    elif policy.data_parallel_size not in (None, world_size // (tp * pp * cp)):
        message = f"but {world_size} ranks make {world_size // (tp * pp * cp)} replicas"
        fix = f"start {policy.data_parallel_size * tp * pp * cp} ranks, or leave it null"
        yield _error(policy, "data_parallel_size", message, fix)


def _stages(policy: PolicyConfig, spec: ModelSpec | None) -> Iterator[Problem]:
    """Pipeline stages, and the chunks of layers on each."""
    pp, chunks = policy.pipeline_model_parallel_size, policy.virtual_pipeline_model_parallel_size
    if chunks is not None and (pp == 1 or chunks == 1):
        message = "needs pipeline stages" if pp == 1 else "is one chunk a rank, which is the plain pipeline"
        fix = "leave it null" + (", or raise policy.pipeline_model_parallel_size" if pp == 1 else ", or set 2 or more")
        yield _error(policy, "virtual_pipeline_model_parallel_size", message, fix)
    if spec is None:
        return
    if spec.num_layers % pp:
        message = f"does not divide the model's {spec.num_layers} layers"
        yield _error(policy, "pipeline_model_parallel_size", message)
    elif chunks is not None and spec.num_layers % (pp * chunks):
        message = f"x pipeline_model_parallel_size {pp} does not divide the model's {spec.num_layers} layers"
        yield _error(policy, "virtual_pipeline_model_parallel_size", message)


def _memory(policy: PolicyConfig, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """Recomputation and offloading."""
    if policy.offload != "none":
        needs = {"CUDA": cuda, "policy.use_distributed_optimizer": policy.use_distributed_optimizer}
        needs["policy.dtype: bfloat16"] = policy.dtype == "bfloat16"
        missing = [name for name, there in needs.items() if not there]
        if missing:
            yield _error(policy, "offload", f"needs {' and '.join(missing)}", "or set none")
    default = type(policy).model_fields["recompute_modules"].default
    if policy.recompute != "selective" and policy.recompute_modules != default:
        yield _error(policy, "recompute_modules", "has no effect", "set policy.recompute: selective")
    if policy.recompute == "selective":
        yield from _recomputed(policy, spec, cuda=cuda)


def _recomputed(policy: PolicyConfig, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """Modules that the layers have, and that give memory back when they are recomputed."""
    asked, key = set(policy.recompute_modules), "recompute_modules"
    fused = " and ".join(sorted(NEED_TE & asked))
    if fused and (not cuda or policy.layer_spec == "local" or policy.dtype != "bfloat16"):
        message = f"{fused} need Transformer Engine's layers, and they need CUDA and policy.dtype: bfloat16"
        yield _error(policy, key, message, "choose among core_attn, mlp, moe")
    if spec is None:
        return
    kind, others = ("mixture of experts", {"mlp"}) if spec.num_experts else ("dense model", _OF_EXPERTS)
    absent = " and ".join(sorted(asked & others))
    if absent:
        yield _error(policy, key, f"{absent}: not in the layers of a {kind}", "remove it from the list")


def _experts(policy: PolicyConfig, world_size: int, spec: ModelSpec) -> Iterator[Problem]:
    tp, ep = policy.tensor_model_parallel_size, policy.expert_model_parallel_size
    if not spec.num_experts:
        if ep > 1:
            yield _error(policy, "expert_model_parallel_size", "the model has no experts", "set 1")
        return
    if spec.num_experts % ep:
        message = f"does not divide the model's {spec.num_experts} experts"
        yield _error(policy, "expert_model_parallel_size", message)
    replicas, rest = divmod(world_size, tp * policy.pipeline_model_parallel_size)
    if not rest and replicas % ep:
        message = f"does not divide the {replicas} data x context parallel ranks that experts are spread over"
        yield _error(policy, "expert_model_parallel_size", message)
    if tp > 1 and not policy.sequence_parallel:
        message = "is needed by experts under tensor parallelism: each rank routes its own tokens"
        yield _error(policy, "sequence_parallel", message, "set true")


def check_tokens(config: Config, spec: ModelSpec | None) -> Iterator[Problem]:
    """Prompt + response <= engine <= model, and every sequence fits into a micro-batch."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    longest, engine = prompt + response, config.rollout.engine.max_model_len
    budget = f"data.max_prompt_tokens ({prompt}) + rollout.max_response_tokens ({response}) = {longest}"
    if longest > engine:
        yield error(config, "rollout.engine.max_model_len", f"is less than {budget}", f"set at least {longest}")
    if spec is not None and engine > spec.max_position_embeddings:
        message = f"exceeds the model's max_position_embeddings ({spec.max_position_embeddings})"
        yield error(
            config, "rollout.engine.max_model_len", message, "shorten the token budgets, or scale the positions"
        )
    cp = config.policy.context_parallel_size
    multiple = sequence_multiple(config.policy)
    padded = -(-longest // multiple) * multiple
    if config.policy.micro_batch_tokens * cp < padded:
        share = f" on {cp} context-parallel ranks" if cp > 1 else ""
        message = f"cannot hold the longest sequence{share}, {budget}"
        yield error(config, "policy.micro_batch_tokens", message, f"set at least {-(-padded // cp)}")
    turn = config.rollout.max_turn_tokens
    if turn is not None and turn > response:
        message = f"never acts: rollout.max_response_tokens ({response}) is smaller"
        yield warning(config, "rollout.max_turn_tokens", message)


def check_engine(config: Config, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """vLLM: memory, precision, and extra arguments that would undo what the trainer relies on."""
    engine = config.rollout.engine
    if not cuda:
        yield from _cpu(config, engine)
    yield from _extra(config, engine)
    if spec is None:
        return
    if spec.num_attention_heads % engine.tensor_parallel_size:
        message = f"does not divide the model's {spec.num_attention_heads} attention heads"
        yield error(config, "rollout.engine.tensor_parallel_size", message)
    if not cuda and spec.head_dim not in _CPU_HEAD_SIZES:
        fix = f"it supports {', '.join(map(str, _CPU_HEAD_SIZES))}"
        yield error(config, "model.path", f"head_dim {spec.head_dim} is unknown to vLLM's CPU attention", fix)
    yield from _cache(config, spec)
    yield from _precision(config, spec)


def _cpu(config: Config, engine: EngineConfig) -> Iterator[Problem]:
    if engine.kv_cache_mb is None:
        message = "required without CUDA: vLLM would claim most of the machine's memory"
        yield error(config, "rollout.engine.kv_cache_mb", message, "64 suffices for a tiny model")
    if engine.block_size is not None and engine.block_size % 32:
        yield error(config, "rollout.engine.block_size", "must be a multiple of 32 without CUDA", "set 32")


def _extra(config: Config, engine: EngineConfig) -> Iterator[Problem]:
    for name, value in engine.extra.items():
        if name in _OWNED:
            yield Problem(f"rollout.engine.extra.{name}", "is set elsewhere", f"use {_OWNED[name]}", value)
        elif name in _FIXED:
            yield Problem(f"rollout.engine.extra.{name}", f"is not for you to set: {_FIXED[name]}", "remove it", value)


def _engine_dtype(config: Config, spec: ModelSpec) -> str:
    chosen = config.rollout.engine.dtype
    return spec.dtype if chosen == "auto" else chosen


def _cache(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    """vLLM refuses to start when its cache cannot hold one sequence of max_model_len."""
    engine = config.rollout.engine
    if engine.kv_cache_mb is None:
        return
    heads = max(1, spec.num_key_value_heads // engine.tensor_parallel_size)
    bytes_each = 4 if _engine_dtype(config, spec) == "float32" else 2
    per_token = 2 * spec.num_layers * heads * spec.head_dim * bytes_each
    needed = -(-per_token * engine.max_model_len // 2**20)
    if engine.kv_cache_mb < needed:
        message = f"cannot hold one sequence of {engine.max_model_len} tokens ({per_token} bytes each)"
        yield error(config, "rollout.engine.kv_cache_mb", message, f"set at least {needed}")


def _precision(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    trainer, sampler = config.policy.dtype, _engine_dtype(config, spec)
    limit = config.rollout.mismatch_limit
    if trainer != sampler:
        message = f"but the engine runs in {sampler}: sampler and trainer will disagree by rounding"
        yield warning(config, "policy.dtype", message, "set rollout.engine.dtype to the same")
    if limit is not None and limit < _BFLOAT16_MISMATCH and "bfloat16" in (trainer, sampler):
        message = "is within the rounding of bfloat16: a healthy run may stop"
        yield warning(config, "rollout.mismatch_limit", message, f"set {_BFLOAT16_MISMATCH} or more, or null")
