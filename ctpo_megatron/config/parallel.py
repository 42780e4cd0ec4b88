"""Checks of the parallel layout, recomputation and offloading against the model and the machine."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ctpo_megatron.config.problems import Problem
from ctpo_megatron.config.schema import PolicyConfig
from ctpo_megatron.models import ModelSpec

NEED_TE = frozenset({"layernorm", "moe_act"})
"""Recompute modules that Megatron-Core offers with Transformer Engine's layers only."""

_OF_EXPERTS = frozenset({"moe", "moe_act", "layernorm"})
"""Recompute modules of layers with experts. TE's dense layers fuse norms with projections: `layernorm` has no
effect."""

_LOW = "policy.dtype: bfloat16 or float16"


def check_parallel(policy: PolicyConfig, world_size: int, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """Ranks, and the model's shape against the parallel layout."""
    yield from _ranks(policy, world_size)
    yield from _stages(policy, spec)
    yield from _memory(policy, spec, cuda=cuda)
    yield from _loss_scale(policy)
    tp = policy.tensor_model_parallel_size
    if policy.sequence_parallel and tp == 1:
        fix = "switch it off, or raise policy.tensor_model_parallel_size"
        yield _error(policy, "sequence_parallel", "needs tensor parallelism", fix)
    if policy.overlap_param_gather and not (policy.use_distributed_optimizer and policy.overlap_grad_reduce):
        fix = "set both true, or this false"
        message = "needs policy.use_distributed_optimizer and policy.overlap_grad_reduce"
        yield _error(policy, "overlap_param_gather", message, fix)
    if policy.layer_spec == "transformer_engine":
        needs = {"CUDA": cuda, f"{_LOW} (packed attention)": policy.dtype != "float32"}
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
    """Multiple that packed sequences are padded to: two equal pieces per context-parallel rank, and
    `pad_to_multiple`."""
    pieces = 2 * policy.context_parallel_size if policy.context_parallel_size > 1 else 1
    return math.lcm(pieces, policy.pad_to_multiple)


def against_shared_prefixes(policy: PolicyConfig) -> str:
    """Why passes compute every token of every sequence, though some have the same history; "" where they do not."""
    reasons = {
        "policy.share_prefixes is off": policy.share_prefixes == "off",
        "sequences are split (policy.context_parallel_size)": policy.context_parallel_size > 1,
        "experts are replayed (policy.router_replay)": policy.router_replay,
        "sequences are padded (policy.pad_to_multiple)": policy.pad_to_multiple > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _error(policy: PolicyConfig, name: str, message: str, fix: str = "") -> Problem:
    return Problem(f"policy.{name}", message, fix, getattr(policy, name))


def _ranks(policy: PolicyConfig, world_size: int) -> Iterator[Problem]:
    tp, pp, cp = (
        policy.tensor_model_parallel_size,
        policy.pipeline_model_parallel_size,
        policy.context_parallel_size,
    )
    replicas, wanted = world_size // (tp * pp * cp), policy.data_parallel_size
    if world_size % (tp * pp * cp):
        others = f"pipeline_model_parallel_size {pp}" + (f" x context_parallel_size {cp}" if cp > 1 else "")
        message = f"x {others} = {tp * pp * cp} does not divide the world size {world_size}"
        fix = "start a multiple of that many ranks: torchrun --nproc-per-node N (for a dry run: WORLD_SIZE=N)"
        yield _error(policy, "tensor_model_parallel_size", message, fix)
    elif wanted is not None and wanted != replicas:
        message = f"but {world_size} ranks make {replicas} replicas"
        fix = f"start {wanted * tp * pp * cp} ranks, or leave it null"
        yield _error(policy, "data_parallel_size", message, fix)


def _stages(policy: PolicyConfig, spec: ModelSpec | None) -> Iterator[Problem]:
    """Pipeline stages, and chunks of layers per rank."""
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
        needs[_LOW] = policy.dtype != "float32"
        missing = [name for name, there in needs.items() if not there]
        if missing:
            yield _error(policy, "offload", f"needs {' and '.join(missing)}", "or set none")
    default = type(policy).model_fields["recompute_modules"].default
    if policy.recompute != "selective" and policy.recompute_modules != default:
        yield _error(policy, "recompute_modules", "has no effect", "set policy.recompute: selective")
    if policy.recompute == "selective":
        yield from _recomputed(policy, spec, cuda=cuda)


def _loss_scale(policy: PolicyConfig) -> Iterator[Problem]:
    """Powers of two change exponents alone, so that gradients keep their bits."""
    chosen, default = policy.initial_loss_scale, type(policy).model_fields["initial_loss_scale"].default
    if math.frexp(chosen)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(chosen))
        yield _error(policy, "initial_loss_scale", "is no power of two", f"set {nearest:g}")
    elif chosen != default and policy.dtype != "float16":
        yield _error(policy, "initial_loss_scale", f"has no effect in {policy.dtype}", "set policy.dtype: float16")


def _recomputed(policy: PolicyConfig, spec: ModelSpec | None, *, cuda: bool) -> Iterator[Problem]:
    """Modules that exist in the layers and save memory when recomputed."""
    asked, key = set(policy.recompute_modules), "recompute_modules"
    fused = " and ".join(sorted(NEED_TE & asked))
    if fused and (not cuda or policy.layer_spec == "local" or policy.dtype == "float32"):
        message = f"{fused} need Transformer Engine's layers, and they need CUDA and {_LOW}"
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
        if policy.router_replay:
            yield _error(policy, "router_replay", "the model has no experts", "set false")
        return
    if policy.router_replay and spec.num_experts_per_token < 2:
        message = "needs two experts a token: two equal ones say that none was recorded"
        yield _error(policy, "router_replay", message, "set false")
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
