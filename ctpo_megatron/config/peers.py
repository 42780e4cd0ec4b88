"""Keys of TRL and verl: what each is here, or why it is not here. Messages for unknown keys use it; the pages agree.

An entry is `name: "our keys; a note"`. Without our keys the note is the reason. TRL's names are arguments of
`GRPOConfig` and `GRPOTrainer`. verl's are without `actor_rollout_ref`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from ctpo_megatron.config.keys import flattened, known_paths

_ALL_WEIGHTS = "no adapters are trained: every update is of all weights"
_NO_KL = "there is no KL term: the published objective has none, its clip window bounds what an update changes"
_NO_TEACHER = "no second model is loaded: sample from the teacher, and train on its answers (sft.data)"
_NO_CRITIC = "there is no critic: the baseline of a prompt is the mean reward of its samples"
_OWN_ENGINES = "; a run starts its own engines: with placement.mode: disaggregated they have GPUs of their own"
_MEGATRON = "; Megatron-Core shards the model: policy.tensor_model_parallel_size and the other sizes"
_COLUMNS = "; the columns have fixed names (docs/data.md)"
_WHOLE = "; tokens are sampled from the model's whole distribution, or with rollout.top_p and rollout.top_k"
_WIDTHS = "the same width with objective.clip_mode: ratio; CTPO's is in nats"
_EPOCHS = "run.steps; steps alone, no epochs"
_STEPS = "prompts_per_step x gradient_accumulation_steps / steps_per_generation"
_UPLOAD = "; nothing is uploaded: `hf upload` takes the folder model/ of a run"

TRL = {
    "train_dataset": "data.train; files (docs/data.md)",
    "eval_dataset": "data.eval; files (docs/data.md)",
    "shuffle_dataset": "data.shuffle",
    "reward_funcs": "reward.function; one function a prompt, which weighs its parts",
    "reward_weights": "reward.function; weigh the parts in it, and return them as `components`",
    "tools": "rollout.tools",
    "environment_factory": "rollout.environment",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_eval": "eval.samples",
    "generation_batch_size": "rollout.prompts_per_step; prompts, not completions: divide by num_generations",
    "steps_per_generation": f"policy.mini_batch_prompts; {_STEPS}",
    "gradient_accumulation_steps": f"policy.mini_batch_prompts; {_STEPS}",
    "num_iterations": "policy.passes_per_batch",
    "per_device_train_batch_size": "policy.micro_batch_tokens; tokens, packed without padding",
    "per_device_eval_batch_size": "rollout.engine.max_num_seqs; engines evaluate as they sample",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_completion_length": "rollout.max_response_tokens; tool outputs count",
    "max_tool_calling_iterations": "rollout.max_tool_calls",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "min_p": _WHOLE,
    "repetition_penalty": _WHOLE,
    "generation_kwargs": _WHOLE,
    "use_vllm": "; engines are always vLLM's",
    "vllm_mode": "placement.mode; `colocated` is `colocate`",
    "vllm_server_host": _OWN_ENGINES,
    "vllm_server_port": _OWN_ENGINES,
    "vllm_server_base_url": _OWN_ENGINES,
    "vllm_server_timeout": _OWN_ENGINES,
    "vllm_enable_sleep_mode": "placement.mode; engines that are colocated sleep",
    "vllm_gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.engine.tensor_parallel_size",
    "vllm_max_model_length": "rollout.engine.max_model_len",
    "epsilon": f"objective.clip_low; {_WIDTHS}",
    "epsilon_high": f"objective.clip_high; {_WIDTHS}",
    "delta": f"objective.clip_c; {_WIDTHS}",
    "beta": f"; {_NO_KL}",
    "sync_ref_model": f"; {_NO_KL}",
    "loss_type": "objective.preset, objective.loss_agg_mode; TRL's dapo is preset grpo with token-mean and clip_c -1",
    "importance_sampling_level": "objective.ratio_mode; token, or sequence-geomean for sequence",
    "scale_rewards": "objective.advantage.normalize_std",
    "entropy_coef": "objective.entropy_coef",
    "top_entropy_quantile": "; tokens are not chosen by their entropy",
    "off_policy_mask_threshold": "objective.correction.reject",
    "vllm_importance_sampling_correction": "objective.correction.level, objective.anchor; with anchor: decoupled",
    "vllm_importance_sampling_mode": "objective.correction.level; needs objective.anchor: decoupled",
    "vllm_importance_sampling_cap": "objective.correction.cap",
    "vllm_importance_sampling_clip_max": "objective.correction.cap",
    "DPPOConfig.loss_mode": "objective.clip_mode",
    "max_staleness": "rollout.max_staleness",
    "sapo_temperature_pos": "objective.tau_positive",
    "sapo_temperature_neg": "objective.tau_negative",
    "mask_truncated_completions": "rollout.filters; [truncated]",
    "learning_rate": "policy.optimizer.lr",
    "lr_scheduler_type": "policy.optimizer.schedule",
    "warmup_steps": "policy.optimizer.warmup_steps",
    "warmup_ratio": "policy.optimizer.warmup_steps; steps, not a share of them",
    "weight_decay": "policy.optimizer.weight_decay",
    "adam_beta1": "policy.optimizer.betas",
    "adam_beta2": "policy.optimizer.betas",
    "adam_epsilon": "policy.optimizer.eps",
    "max_grad_norm": "policy.optimizer.clip_grad",
    "bf16": "policy.dtype; bfloat16",
    "fp16": "policy.dtype; float16",
    "gradient_checkpointing": "policy.recompute",
    "use_liger_kernel": "policy.head; streaming, the default",
    "deepspeed": _MEGATRON,
    "fsdp": _MEGATRON,
    "max_steps": "run.steps",
    "num_train_epochs": _EPOCHS,
    "seed": "run.seed",
    "output_dir": "run.root",
    "run_name": "run.name",
    "resume_from_checkpoint": "run.resume, checkpoint.load",
    "save_steps": "checkpoint.every",
    "save_strategy": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "report_to": "tracking.trackers",
    "logging_steps": "; every step is logged",
    "log_completions": "tracking.trajectories",
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
}
VERL = {
    "model.custom_chat_template": "model.chat_template",
    "model.enable_gradient_checkpointing": "policy.recompute",
    "data.train_files": "data.train",
    "data.val_files": "data.eval",
    "data.prompt_key": f"data.train{_COLUMNS}",
    "data.reward_fn_key": f"data.train{_COLUMNS}",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.filter_overlong_prompts": "data.overlong; drop, or refuse",
    "data.truncation": "data.overlong; drop, or refuse: prompts are not cut",
    "data.apply_chat_template_kwargs": "model.chat_template_kwargs",
    "data.train_batch_size": "rollout.prompts_per_step",
    "actor.ppo_mini_batch_size": "policy.mini_batch_prompts",
    "actor.ppo_micro_batch_size": "policy.micro_batch_tokens; tokens, packed without padding",
    "actor.ppo_micro_batch_size_per_gpu": "policy.micro_batch_tokens; tokens, packed without padding",
    "actor.ppo_max_token_len_per_gpu": "policy.micro_batch_tokens",
    "actor.use_dynamic_bsz": "policy.micro_batch_tokens; always by tokens",
    "actor.ppo_epochs": "policy.passes_per_batch",
    "actor.strategy": _MEGATRON,
    "actor.fsdp_config": _MEGATRON,
    "actor.optim.lr": "policy.optimizer.lr",
    "actor.optim.min_lr": "policy.optimizer.min_lr",
    "actor.optim.lr_decay_style": "policy.optimizer.schedule",
    "actor.optim.lr_warmup_steps": "policy.optimizer.warmup_steps",
    "actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "actor.optim.clip_grad": "policy.optimizer.clip_grad",
    "actor.megatron.tensor_model_parallel_size": "policy.tensor_model_parallel_size",
    "actor.megatron.pipeline_model_parallel_size": "policy.pipeline_model_parallel_size",
    "actor.megatron.context_parallel_size": "policy.context_parallel_size",
    "actor.megatron.expert_model_parallel_size": "policy.expert_model_parallel_size",
    "actor.megatron.param_offload": "policy.offload; all",
    "actor.megatron.optimizer_offload": "policy.offload; optimizer",
    "actor.megatron.grad_offload": "policy.offload",
    "actor.megatron.override_transformer_config.recompute_granularity": "policy.recompute",
    "actor.router_replay.mode": "policy.router_replay",
    "actor.megatron.router_replay.mode": "policy.router_replay",
    "rollout.enable_rollout_routing_replay": "policy.router_replay",
    "actor.clip_ratio": f"objective.clip_low, objective.clip_high; {_WIDTHS}",
    "actor.clip_ratio_low": f"objective.clip_low; {_WIDTHS}",
    "actor.clip_ratio_high": f"objective.clip_high; {_WIDTHS}",
    "actor.clip_ratio_c": f"objective.clip_c; {_WIDTHS}",
    "actor.policy_loss.loss_mode": "objective.preset, objective.ratio_mode, objective.clip_mode",
    "actor.policy_loss.tau_pos": "objective.tau_positive",
    "actor.policy_loss.tau_neg": "objective.tau_negative",
    "actor.loss_agg_mode": "objective.loss_agg_mode",
    "actor.loss_scale_factor": "objective.loss_scale_factor",
    "actor.entropy_coeff": "objective.entropy_coef",
    "actor.checkpoint.save_contents": "; a checkpoint has all that a resume needs; `ctpo export` writes the model",
    "algorithm.adv_estimator": "objective.preset, objective.advantage.kind; verl's grpo is preset grpo with token-mean",
    "algorithm.norm_adv_by_std_in_grpo": "objective.advantage.normalize_std",
    "algorithm.rollout_correction.rollout_is": "objective.correction.level, objective.anchor; with anchor: decoupled",
    "algorithm.rollout_correction.rollout_is_threshold": "objective.correction.cap",
    "algorithm.rollout_correction.rollout_rs": "objective.correction.reject",
    "algorithm.rollout_correction.rollout_rs_threshold": "objective.correction.reject",
    "algorithm.filter_groups.enable": "rollout.uniform_groups; refill",
    "algorithm.filter_groups.max_num_gen_batches": "rollout.max_refills; rounds after the first",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.name": "; engines are always vLLM's",
    "rollout.prompt_length": "data.max_prompt_tokens",
    "rollout.response_length": "rollout.max_response_tokens",
    "rollout.tensor_model_parallel_size": "rollout.engine.tensor_parallel_size",
    "rollout.gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "rollout.max_model_len": "rollout.engine.max_model_len",
    "rollout.max_num_seqs": "rollout.engine.max_num_seqs",
    "rollout.max_num_batched_tokens": "rollout.engine.extra; {max_num_batched_tokens: N}",
    "rollout.enforce_eager": "rollout.engine.enforce_eager",
    "rollout.agent": "rollout.environment",
    "rollout.agent.default_agent_loop": "rollout.environment, rollout.endpoint.agent; a class of yours",
    "rollout.agent.agent_loop_config_path": "rollout.environment, rollout.endpoint.agent; a class of yours",
    "rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "rollout.multi_turn.max_tool_response_length": "rollout.max_observation_chars",
    "rollout.multi_turn.tool_config_path": "rollout.tools",
    "rollout.multi_turn.format": "rollout.tool_parser",
    "rollout.val_kwargs.n": "eval.samples",
    "rollout.val_kwargs.temperature": "eval.temperature",
    "rollout.val_kwargs.top_p": "eval.top_p",
    "rollout.checkpoint_engine.update_weights_bucket_megabytes": "rollout.weights.bucket_mib",
    "async_training.staleness_threshold": "rollout.max_staleness; updates, not a share of samples",
    "async_training.partial_rollout": "rollout.partial",
    "reward.custom_reward_function.path": "reward.function, reward.by_source; module:Name",
    "reward.custom_reward_function.name": "reward.function, reward.by_source; module:Name",
    "reward_model.overlong_buffer": "reward.overlong_penalty",
    "reward_model": "; there are no trained reward models: reward.function is a function (docs/howto/reward.md)",
    "trainer.total_training_steps": "run.steps",
    "trainer.total_epochs": _EPOCHS,
    "trainer.experiment_name": "run.name",
    "trainer.project_name": "tracking.trackers; an argument of the tracker: {name: wandb, arguments: {project: ...}}",
    "trainer.default_local_dir": "run.root",
    "trainer.resume_mode": "run.resume",
    "trainer.resume_from_path": "checkpoint.load",
    "trainer.save_freq": "checkpoint.every",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "eval.before_training",
    "trainer.logger": "tracking.trackers",
    "trainer.rollout_data_dir": "tracking.trajectories",
    "trainer.nnodes": "cluster.nodes",
    "trainer.n_gpus_per_node": "placement.trainer_gpus; engines have GPUs of their own, or share these",
}
_PEERS = {"TRL": TRL, "verl": VERL}
_CONCEPTS = (
    # What a last name is about, and the reason.
    (r"(^|_)kl(_|$)|^(ref|reference)_(model|policy)$", _NO_KL),
    (r"(^|_)(q?lora|peft|adapters?)(_|$)", _ALL_WEIGHTS),
    (r"(^|_)(critic|gae)(_|$)|^value_(head|model)$", _NO_CRITIC),
    (r"(^|_)(teacher|distill\w*)(_|$)", _NO_TEACHER),
)
_PAGES = {_NO_KL: " (docs/objective.md)", _ALL_WEIGHTS: " (docs/limits.md)", _NO_TEACHER: " (docs/limits.md)"}
_SHOWN = 6


class PeerKey(NamedTuple):
    """What a key of another trainer is here.

    peer: whose key; empty for a word of the field. keys: ours; none: it is not here, and `note` says why.
    """

    peer: str
    keys: tuple[str, ...]
    note: str

    @property
    def advice(self) -> tuple[str, str]:
        """What is wrong with such a key, and what to do."""
        if not self.keys:
            return self.note, f"remove the key{_PAGES.get(self.note, '')}"
        return "unknown key", f"{self.peer}'s name for {self.here}"

    @property
    def here(self) -> str:
        """Our keys and the note, or the reason why there are none."""
        note = f" ({self.note})" if self.note else ""
        return " and ".join(self.keys) + note if self.keys else self.note


def answer(path: str) -> PeerKey | None:
    """Returns the entry for a dotted key, in any section; None if there is no entry."""
    fitting = [(near, told) for name, told in _entries() if (near := _nearness(path, name, told.keys)) is not None]
    if fitting:
        return min(fitting, key=lambda entry: entry[0])[1]
    last = path.rpartition(".")[2]
    return next((PeerKey("", (), reason) for pattern, reason in _CONCEPTS if re.search(pattern, last)), None)


def advice(path: str, value: Any) -> tuple[str, str] | None:
    """Returns what is wrong with an unknown key or section, and what to do; None if there is no entry for it."""
    leaves = [path]
    if isinstance(value, Mapping):
        leaves = [key for key, _ in flattened(value, f"{path}.")] or leaves
    answers = {leaf: told for leaf in leaves if (told := _nearest_answer(leaf, path)) is not None}
    if not answers:
        return None
    if len({*answers.values()}) == 1:
        return next(iter(answers.values())).advice
    lines = [f"{leaf}{' is' if told.keys else ':'} {told.here}" for leaf, told in answers.items()]
    more = f"; {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "unknown key", f"of TRL or verl: {'; '.join(lines[:_SHOWN])}{more} (docs/glossary.md)"


@cache
def _entries() -> tuple[tuple[str, PeerKey], ...]:
    """Name and answer of every entry."""
    found = []
    for peer, table in _PEERS.items():
        for name, text in table.items():
            ours, _, note = text.partition(";")
            found.append((name, PeerKey(peer, tuple(filter(None, ours.split(", "))), note.strip())))
    return tuple(found)


def _nearest_answer(leaf: str, top: str) -> PeerKey | None:
    """The answer to a key, else to the closest section around it, up to `top`."""
    while len(leaf) >= len(top):
        if (told := answer(leaf)) is not None:
            return told
        leaf = leaf.rpartition(".")[0]
    return None


def _nearness(path: str, name: str, keys: tuple[str, ...]) -> tuple[int, int] | None:
    """How well a path fits an entry, the least best; None: not at all."""
    section, _, last = path.rpartition(".")
    if path == name:
        return 0, 0
    if path.endswith(f".{name}"):
        # One word may mean something else: it counts where our key is, or in a section of the top level.
        its_place = keys[0].rpartition(".")[0] if keys else section.partition(".")[0]
        return None if name.isalnum() and section != its_place else (1, -len(name))
    if name.endswith(f".{path}") and not path.isalnum():
        return 2, len(name)
    alike = "_" in last and last == name.rpartition(".")[2] and last not in _last_names()
    return (3, len(name)) if alike else None


@cache
def _last_names() -> frozenset[str]:
    """Of our keys."""
    return frozenset(path.rpartition(".")[2] for path in known_paths())
