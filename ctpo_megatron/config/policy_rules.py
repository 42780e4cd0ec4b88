"""Rules of the trainer: its parallel layout on ranks and model, batches, schedules, and the objective.

Settings of Megatron-Core that train wrongly without an error are refused by not being offered: `batch_p2p_comm`,
`overlap_p2p_comm`, `deallocate_pipeline_outputs`, `perform_initialization`, `expert_tensor_parallel_size`.
docs/config.md says what each of them would do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.config.objective import objective_from_config
from ctpo_megatron.config.objective_schema import PRESETS, RejectConfig
from ctpo_megatron.config.placement import NEED_TE, Job, against_shared_prefixes, needs_engines
from ctpo_megatron.config.problems import ConfigError, Problem, error, warning
from ctpo_megatron.config.schema import Config, OptimizerConfig, PolicyConfig
from ctpo_megatron.models import ModelSpec

_OF_EXPERTS = frozenset({"moe", "moe_act", "layernorm"})
"""Recompute modules of layers with experts. TE's dense layers fuse norms with projections: `layernorm` has no
effect."""

_LOW = "policy.dtype: bfloat16 or float16"


def check_layout(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Check the parallel layout against the ranks and the model."""
    return layout_problems(config.policy, model, job)


def layout_problems(policy: PolicyConfig, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Ranks, and the model's shape against the parallel layout."""
    yield from _layout_of_ranks(policy, job)
    yield from _stages(policy, model)
    yield from _recompute_and_offload(policy, model, job)
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
        needs = {"CUDA": job.cuda, f"{_LOW} (packed attention)": policy.dtype != "float32"}
        missing = [name for name, there in needs.items() if not there]
        if missing:
            message = f"Transformer Engine needs {' and '.join(missing)}"
            yield _error(policy, "layer_spec", message, "set auto or local")
    if model is None:
        return
    for name, amount in (
        ("attention heads", model.num_attention_heads),
        ("key/value heads", model.num_key_value_heads),
        ("MLP channels", model.moe_intermediate_size or model.intermediate_size),
    ):
        if amount % tp:
            message = f"does not divide the model's {amount} {name}"
            yield _error(policy, "tensor_model_parallel_size", message)
    yield from _experts(policy, model, job)


def _error(policy: PolicyConfig, name: str, message: str, fix: str = "") -> Problem:
    return Problem(f"policy.{name}", message, fix, getattr(policy, name))


def _layout_of_ranks(policy: PolicyConfig, job: Job) -> Iterator[Problem]:
    world_size = job.world_size
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


def _stages(policy: PolicyConfig, model: ModelSpec | None) -> Iterator[Problem]:
    """Pipeline stages, and chunks of layers per rank."""
    pp, chunks = policy.pipeline_model_parallel_size, policy.virtual_pipeline_model_parallel_size
    if chunks is not None and (pp == 1 or chunks == 1):
        message = "needs pipeline stages" if pp == 1 else "is one chunk a rank, which is the plain pipeline"
        fix = "leave it null" + (", or raise policy.pipeline_model_parallel_size" if pp == 1 else ", or set 2 or more")
        yield _error(policy, "virtual_pipeline_model_parallel_size", message, fix)
    if model is None:
        return
    if model.num_layers % pp:
        message = f"does not divide the model's {model.num_layers} layers"
        yield _error(policy, "pipeline_model_parallel_size", message)
    elif chunks is not None and model.num_layers % (pp * chunks):
        message = f"x pipeline_model_parallel_size {pp} does not divide the model's {model.num_layers} layers"
        yield _error(policy, "virtual_pipeline_model_parallel_size", message)


def _recompute_and_offload(policy: PolicyConfig, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Recomputation and offloading."""
    if policy.offload != "none":
        needs = {"CUDA": job.cuda, "policy.use_distributed_optimizer": policy.use_distributed_optimizer}
        needs[_LOW] = policy.dtype != "float32"
        missing = [name for name, there in needs.items() if not there]
        if missing:
            yield _error(policy, "offload", f"needs {' and '.join(missing)}", "or set none")
    default = type(policy).model_fields["recompute_modules"].default
    if policy.recompute != "selective" and policy.recompute_modules != default:
        yield _error(policy, "recompute_modules", "has no effect", "set policy.recompute: selective")
    if policy.recompute == "selective":
        yield from _recomputed(policy, model, job)


def _loss_scale(policy: PolicyConfig) -> Iterator[Problem]:
    """Powers of two change exponents alone, so that gradients keep their bits."""
    chosen, default = policy.initial_loss_scale, type(policy).model_fields["initial_loss_scale"].default
    if math.frexp(chosen)[0] != 0.5:
        nearest = 2.0 ** round(math.log2(chosen))
        yield _error(policy, "initial_loss_scale", "is no power of two", f"set {nearest:g}")
    elif chosen != default and policy.dtype != "float16":
        yield _error(policy, "initial_loss_scale", f"has no effect in {policy.dtype}", "set policy.dtype: float16")


def _recomputed(policy: PolicyConfig, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Modules that exist in the layers and save memory when recomputed."""
    asked, key = set(policy.recompute_modules), "recompute_modules"
    fused = " and ".join(sorted(NEED_TE & asked))
    if fused and (not job.cuda or policy.layer_spec == "local" or policy.dtype == "float32"):
        message = f"{fused} need Transformer Engine's layers, and they need CUDA and {_LOW}"
        yield _error(policy, key, message, "choose among core_attn, mlp, moe")
    if model is None:
        return
    kind, others = ("mixture of experts", {"mlp"}) if model.num_experts else ("dense model", _OF_EXPERTS)
    absent = " and ".join(sorted(asked & others))
    if absent:
        yield _error(policy, key, f"{absent}: not in the layers of a {kind}", "remove it from the list")


def _experts(policy: PolicyConfig, model: ModelSpec, job: Job) -> Iterator[Problem]:
    world_size = job.world_size
    tp, ep = policy.tensor_model_parallel_size, policy.expert_model_parallel_size
    if not model.num_experts:
        if ep > 1:
            yield _error(policy, "expert_model_parallel_size", "the model has no experts", "set 1")
        if policy.router_replay:
            yield _error(policy, "router_replay", "the model has no experts", "set false")
        return
    if policy.router_replay and model.num_experts_per_token < 2:
        message = "needs two experts a token: two equal ones say that none was recorded"
        yield _error(policy, "router_replay", message, "set false")
    if model.num_experts % ep:
        message = f"does not divide the model's {model.num_experts} experts"
        yield _error(policy, "expert_model_parallel_size", message)
    replicas, rest = divmod(world_size, tp * policy.pipeline_model_parallel_size)
    if not rest and replicas % ep:
        message = f"does not divide the {replicas} data x context parallel ranks that experts are spread over"
        yield _error(policy, "expert_model_parallel_size", message)
    if tp > 1 and not policy.sequence_parallel:
        message = "is needed by experts under tensor parallelism: each rank routes its own tokens"
        yield _error(policy, "sequence_parallel", message, "set true")


def check_attention(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Context parallelism in local layers: whole keys and values on every rank, and a mask that is not in the plan."""
    policy = config.policy
    if job.cuda and policy.context_parallel_size > 1 and (why := _why_local(config)):
        message = (
            f"without Transformer Engine's layers ({why}) every rank holds all keys and values of a layer and a mask "
            "of tokens x tokens: not in the memory plan"
        )
        settings = ["policy.dtype: bfloat16"] if policy.dtype == "float32" else []
        settings += ["policy.layer_spec: auto"] if policy.layer_spec != "auto" else []
        fix = " and ".join(["install it (docs/install_cuda.md)", *settings]) + ", or split by tensor parallelism"
        yield warning(config, "policy.context_parallel_size", message, fix)


def _why_local(config: Config) -> str:
    """Why the layers are local; empty where they are Transformer Engine's, as far as this machine shows."""
    policy = config.policy
    if policy.layer_spec == "local" or policy.dtype == "float32":
        return "policy.layer_spec: local" if policy.layer_spec == "local" else "policy.dtype: float32"
    if policy.layer_spec == "auto" and (te_trouble() or not is_installed(TE)):
        return "it is not installed here"
    return ""


def prefix_note(config: Config, *, cuda: bool) -> str:
    """Return whether passes compute tokens with the same history once, as far as this machine shows, and why not."""
    if against := against_shared_prefixes(config.policy):
        return f"not shared: {against}"
    whole_attention = ", in attention for each sequence" if cuda and not _why_local(config) else ""
    return f"tokens with the same history are computed once{whole_attention}"


def check_router_replay(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Check whether engines can report experts, and what a mixture risks without; `check_layout` looks at the model."""
    if model is None or model.num_experts_per_token < 2:  # of one expert a token nothing can be recorded
        return
    if not config.policy.router_replay:
        message = (
            "is off, and the model is a mixture of experts: sampler and trainer choose differently where two experts "
            "are nearly level, and their log-probs are then of different experts (docs/parallelism.md)"
        )
        yield warning(
            config,
            "policy.router_replay",
            message,
            f"set true{', and rollout.engine.model_runner: v2' if job.cuda else ''}",
        )
    elif needs_engines(config):
        yield from _experts_of_engines(config, job)


def _experts_of_engines(config: Config, job: Job) -> Iterator[Problem]:
    engine = config.rollout.engine
    if not job.cuda:
        if engine.tensor_parallel_size > 1:
            message = "needs engines of one worker on a CPU: the experts of several cannot be read"
            yield error(config, "policy.router_replay", message, "set rollout.engine.tensor_parallel_size: 1")
        return
    if engine.model_runner != "v2":
        message = "reports no experts, which policy.router_replay needs"
        yield error(config, "rollout.engine.model_runner", message, "set v2, or policy.router_replay: false")
    if engine.extra.get("enable_prefix_caching") is False:
        message = "must stay on with policy.router_replay: vLLM keeps the experts of tokens with its cache"
        yield Problem("rollout.engine.extra.enable_prefix_caching", message, "remove it", False)


def check_batch(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    rollout, policy, world_size = config.rollout, config.policy, job.world_size
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
    if rollout.prompts_per_step == mini and policy.passes_per_batch == 1 and config.objective.anchor != "behaviour":
        message = "makes exactly one update per batch: the ratio is identically 1 and the clip never acts"
        fix = (
            f"use a smaller divisor of rollout.prompts_per_step ({rollout.prompts_per_step}), more "
            "policy.passes_per_batch, or anchor: behaviour"
        )
        yield warning(config, "policy.mini_batch_prompts", message, fix)


def check_schedules(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    policy = config.policy
    updates = max(1, config.rollout.prompts_per_step // policy.mini_batch_prompts) * policy.passes_per_batch
    yield from _schedule(config, "policy.optimizer", policy.optimizer, config.run.steps * updates)
    if (sft := config.sft) is not None:
        yield from _schedule(config, "sft.optimizer", sft.optimizer, sft.steps)


def _schedule(config: Config, key: str, optimizer: OptimizerConfig, steps: int) -> Iterator[Problem]:
    if optimizer.min_lr > optimizer.lr:
        yield error(config, f"{key}.min_lr", f"is above lr ({optimizer.lr:g})", "lower it")
    if steps and optimizer.warmup_steps >= steps:
        message = f"never reaches the full lr: there are {steps} optimizer steps"
        yield warning(config, f"{key}.warmup_steps", message, "lower it")
    for index, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield error(config, f"{key}.betas", f"item {index} must be in [0, 1)", "the usual values are [0.9, 0.95]")


_TRUST_REGIONS = ("binary_tv", "binary_kl", "prefix_tv", "sequence_k3")
"""Clip modes that take out of the loss what is too far from the anchor."""


def check_objective(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Advantages, the loss itself, its anchor, and what is known of the sampler's log-probs."""
    yield from _advantages(config)
    yield from _loss(config)
    yield from _credit(config)
    yield from _correction(config)
    for number, reject in enumerate(config.objective.correction.reject):
        yield from _reject(f"objective.correction.reject.{number}", reject)
    yield from _sampling(config)


def _advantages(config: Config) -> Iterator[Problem]:
    kind = config.objective.advantage.kind
    if config.rollout.samples_per_prompt == 1 and kind in ("group", "rloo"):
        message = f"gives no advantage {kind!r}: a trajectory would be compared with itself alone, and nothing learned"
        fix = "sample at least 2, or set objective.advantage.kind: mean_baseline"
        yield error(config, "rollout.samples_per_prompt", message, fix)
    if config.rollout.samples_per_prompt == config.rollout.prompts_per_step == 1:
        message = "a batch of one trajectory has nothing to be compared with, and nothing is learned"
        yield error(config, "rollout.prompts_per_step", message, "sample more prompts, or more samples of each")


def _loss(config: Config) -> Iterator[Problem]:
    function = config.objective.function
    if function is not None and not function.is_path:
        fix = "write package.module:Name; for one of ours set objective.preset"
        yield Problem("objective.function", "is no import path", fix, function.name)
    try:
        objective = objective_from_config(config.objective)
    except ConfigError as refused:
        yield from refused.problems
        return
    if function is not None and objective.entropy_coef:
        message = "is of our own objectives; objective.function decides all of its loss"
        yield error(config, "objective.entropy_coef", message, "remove it")
    if function is None and objective.clip_mode in _TRUST_REGIONS and config.objective.anchor != "behaviour":
        message = f"makes clip_mode: {objective.clip_mode} measure from the trainer; its authors do from the sampler"
        yield warning(config, "objective.anchor", message, "set behaviour")
    if config.objective.preset == "dr-grpo" and config.objective.loss_scale_factor is None:
        fix = f"set it to rollout.max_response_tokens ({config.rollout.max_response_tokens})"
        message = "is 1: the sum over a response's tokens, which dr-grpo divides by the longest response, is the loss"
        yield warning(config, "objective.loss_scale_factor", message, fix)


def _credit(config: Config) -> Iterator[Problem]:
    objective = config.objective
    if objective.credit == "outcome":
        if objective.turn_ratio is not None:
            message = "has no effect with objective.credit: outcome, which knows no turns"
            yield error(config, "objective.turn_ratio", message, "remove it, or set objective.credit: turn")
        return
    clip_mode = objective.clip_mode or PRESETS[objective.preset].get("clip_mode")
    if objective.function is None and clip_mode == "token_log":
        message = "gives the turns of a sequence advantages of both signs, and clip_mode: token_log needs one"
        yield error(config, "objective.credit", message, "set outcome, or another preset than gmpo")
    if objective.turn_ratio == "turn-end" and objective.function is not None:
        message = "is of our own objectives; objective.function decides all of its loss"
        yield error(config, "objective.turn_ratio", message, "remove it; inputs.turn has the turns")
    if objective.turn_ratio == "turn-end" and objective.anchor == "decoupled":
        message = "takes ratios to the end of a turn, and the weights of anchor: decoupled end elsewhere"
        yield error(config, "objective.turn_ratio", message, "set objective.anchor: behaviour, whose ratio is exact")


def _correction(config: Config) -> Iterator[Problem]:
    anchor, correction = config.objective.anchor, config.objective.correction
    key = "objective.correction.level"
    if anchor == "decoupled" and correction.level == "none":
        message = "is the proximal ratio times a weight, and objective.correction.level is none"
        yield error(config, "objective.anchor", message, "set the level, e.g. sequence, or anchor: proximal")
    elif anchor == "proximal" and correction.level != "none":
        yield error(config, key, "multiplies the proximal ratio by a weight", "set objective.anchor: decoupled")
    elif anchor == "behaviour" and correction.level != "none":
        message = "would count twice: with anchor: behaviour the ratio itself is against the sampler"
        yield error(config, key, message, "set it to none, or objective.anchor: decoupled")
    named = [(reject.stat, reject.over) for reject in correction.reject]
    for stat, over in sorted({pair for pair in named if named.count(pair) > 1}):
        message = f"{stat} over {over} is there twice"
        yield Problem("objective.correction.reject", message, "keep the narrower one of the two")


def _reject(key: str, reject: RejectConfig) -> Iterator[Problem]:
    if reject.low is None and reject.high is None:
        yield Problem(key, "has no bound, so nothing leaves", "give low, high or both")
    if reject.stat == "k1":
        if reject.over == "sequence_max":
            yield Problem(f"{key}.over", "k1 has a sign: its largest says nothing", "use k2 or k3", reject.over)
        if (reject.low is not None and reject.low > 0) or (reject.high is not None and reject.high < 0):
            bounds = f"low {reject.low}, high {reject.high}"
            message = f"the bounds ({bounds}) of k1 are nats, not ratios: a token without any difference would leave"
            yield Problem(key, message, "write logarithms, e.g. -0.69 where the sampler is half as sure as the trainer")
        return
    if reject.low is not None:
        yield Problem(f"{key}.low", f"{reject.stat} is never negative and 0 is best", "remove it", reject.low)
    if reject.high is not None and reject.high <= 0:
        yield Problem(f"{key}.high", "must be positive: 0 is no difference at all", "", reject.high)


def _sampling(config: Config) -> Iterator[Problem]:
    """The sampler reports log-probs of the filtered distribution; the trainer's are of the whole vocabulary."""
    objective = config.objective
    used = objective.anchor != "proximal" or objective.correction.rejects
    report = error if used else warning
    message = "the sampler's log-probs are of the filtered distribution, the trainer's are not"
    for key, off, filtered in (
        ("rollout.top_p", "1.0", config.rollout.top_p < 1),
        ("rollout.top_k", "0", config.rollout.top_k > 0),
    ):
        if filtered:
            fix = f"set {off}" + (", or objective.anchor: proximal without correction" if used else "")
            yield report(config, key, message, fix)


def check_groups(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Filters with distinct names, uniform groups that mean something, a penalty within the budget."""
    names = Counter(part.short_name for part in config.rollout.filters)
    for name in (name for name, count in names.items() if count > 1):
        message = f"holds {names[name]} filters named {name}, and metrics could not tell them apart"
        value = [*map(str, config.rollout.filters)]
        yield Problem("rollout.filters", message, "remove one, or give yours another name", value)
    yield from _uniform_groups(config)
    yield from _oversample(config)
    shaping, budget = config.reward.overlong_penalty, config.rollout.max_response_tokens
    if shaping is not None and shaping.buffer > budget:
        message = (
            f"is more than the budget itself (rollout.max_response_tokens: {budget}), so every response would lose"
        )
        yield error(config, "reward.overlong_penalty.buffer", message, "lower it")


def _oversample(config: Config) -> Iterator[Problem]:
    if not config.rollout.oversample:
        return
    if config.rollout.uniform_groups == "refill":
        message = "draws further prompts before it is known how many are needed, and uniform_groups: refill after it"
        yield error(config, "rollout.oversample", message, "set 0, or uniform_groups: drop")
    if config.rollout.replay is not None:
        message = "is for engines; what was not waited for is not in rollout.replay"
        yield error(config, "rollout.oversample", message, "set 0")


def _uniform_groups(config: Config) -> Iterator[Problem]:
    if config.rollout.uniform_groups == "keep":
        return
    if config.rollout.samples_per_prompt == 1:
        message = "would drop everything: the rewards of a group of one are always equal"
        yield error(config, "rollout.uniform_groups", message, "sample at least 2 per prompt, or set keep")
    if config.objective.advantage.kind == "mean_baseline":
        message = "would drop groups that teach: objective.advantage.kind compares them with the whole batch"
        yield error(config, "rollout.uniform_groups", message, "set keep, or an advantage within the group")
