"""Rules for a job of TRL.

Sources: `GRPOConfig.__post_init__` for the sizes of a batch, `GRPOTrainer._compute_loss` for the loss (TRL 1.16.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.init.peer_job import RESPONSE_KEY, Row, Rules, preset
from ctpo_megatron.init.prompts import InitError

_BATCH = ("per_device_train_batch_size", "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps")
_STEPS = ("num_iterations", "max_steps", "num_train_epochs", "warmup_steps", "save_strategy", "save_steps")
_LOSS = ("loss_type", "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg")
_SAMPLER = tuple(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_max", "clip_min"))
_OTHERS = ("max_completion_length", "bf16", "fp16", "adam_beta1", "adam_beta2", "save_total_limit", "output_dir")
_PRESETS = {"dapo": "dapo-trl", "grpo": "grpo-trl", "dr_grpo": "dr-grpo-trl"}
_EPSILON = 1e-4
"""What TRL adds to the standard deviation of rewards, as these presets do."""
_BY_TOKENS = ("dapo", "cispo")
"""Losses that are a mean over the tokens of a whole batch."""
_UNBOUNDED = 1e9
"""A weight that nothing reaches, where TRL has no bound."""


def _batch(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sizes of a batch of one process, and what TRL counts in optimizer steps."""
    samples, accumulated = job["num_generations"], job["gradient_accumulation_steps"]
    per_step = job["per_device_train_batch_size"]
    whole = job["generation_batch_size"]
    micro = whole / per_step if whole else job["steps_per_generation"] or accumulated
    prompts, mini_batch = per_step * micro / samples, per_step * accumulated / samples
    if prompts % 1 or mini_batch % 1 or prompts % mini_batch:
        raise InitError(
            f"--from: in one process a batch has {per_step * micro:g} completions, an optimizer step "
            f"{per_step * accumulated:g}, and both have to be whole groups of num_generations={samples}; multiply "
            "per_device_train_batch_size by the number of processes"
        )
    updates = prompts / mini_batch * job["num_iterations"]
    epoch = math.ceil(job["rows"] / prompts)
    steps = (
        math.ceil(job["max_steps"] / updates) if job["max_steps"] > 0 else math.ceil(job["num_train_epochs"] * epoch)
    )
    warmup, save = job["warmup_steps"], job["save_steps"]
    yield "rollout.prompts_per_step", int(prompts)
    yield "policy.mini_batch_prompts", int(mini_batch)
    yield "policy.passes_per_batch", job["num_iterations"]
    yield "run.steps", steps
    yield "policy.optimizer.warmup_steps", math.ceil(warmup * steps * updates) if warmup < 1 else int(warmup)
    saved = {"no": 0, "epoch": epoch}.get(job["save_strategy"])
    yield "checkpoint.every", max(1, int(save * steps if save < 1 else save / updates)) if saved is None else saved


def _loss(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind, low = job["loss_type"], job["epsilon"]
    high = low if job["epsilon_high"] is None else job["epsilon_high"]
    if kind in _PRESETS:
        yield from preset(_PRESETS[kind], clip_low=low, clip_high=high, clip_c=job["delta"])
        return
    yield "objective.advantage.epsilon", _EPSILON
    if kind == "cispo" and high >= 1:
        yield from preset("cispo", clip_high=high - 1)
    elif kind == "sapo":
        taus = (job["sapo_temperature_pos"], job["sapo_temperature_neg"])
        yield from preset("sapo", tau_positive=taus[0], tau_negative=taus[1])
    else:
        raise InitError(
            f"--from: loss_type={kind!r} with epsilon_high={high} is not among the objectives here; there are "
            f"{', '.join(_PRESETS)}, sapo, and cispo with epsilon_high of at least 1 (docs/objective.md)"
        )


def _different(job: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Row]:
    """Rows about what the loss of TRL counts otherwise."""
    kind, mode = job["loss_type"], job["vllm_importance_sampling_mode"]
    updates = ours["rollout.prompts_per_step"] // ours["policy.mini_batch_prompts"]
    if updates > 1 and kind in _BY_TOKENS:
        means = f"differs: TRL divides each of {updates} updates by their mean number of tokens"
        yield f"loss_type={kind!r}", "policy.mini_batch_prompts", means
    if "objective.correction.reject" in ours and (kind in _BY_TOKENS or mode == "token_mask"):
        counts = "differs: TRL counts rejected tokens in the mean"
        yield f"vllm_importance_sampling_mode={mode!r}", "objective.correction.reject", counts


def _sampler(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The correction of vLLM's log-probs. Without vLLM, TRL has none."""
    correction, mode, largest, least = (job[name] for name in _SAMPLER)
    if not (job["use_vllm"] and correction):
        return
    level, _, how = mode.partition("_")
    if least is not None and how == "truncate":
        raise InitError(
            f"--from: vllm_importance_sampling_clip_min={least} raises weights; here they are capped above alone"
        )
    yield "objective.anchor", "decoupled"
    yield "objective.correction.level", level
    yield "objective.correction.cap", largest or _UNBOUNDED
    bounds = {"low": -math.log(largest)} if largest else {}
    bounds |= {"high": -math.log(least)} if least else {}
    if how == "mask" and bounds:
        over = "token" if level == "token" else "sequence_sum"
        yield "objective.correction.reject", [{"stat": "k1", "over": over, **bounds}]


def _others(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield RESPONSE_KEY, job["max_completion_length"]
    yield "policy.dtype", "float16" if job["fp16"] else "float32" if job["bf16"] is False else "bfloat16"
    yield "policy.optimizer.betas", [job["adam_beta1"], job["adam_beta2"]]
    if job["save_total_limit"]:
        yield "checkpoint.keep_last", job["save_total_limit"]
    folder = Path(job["output_dir"] or "runs/mine")
    yield "run.root", str(folder.parent)
    yield "run.name", job["run_name"] or folder.name


_NAMES = frozenset((*_BATCH, *_STEPS, *_LOSS, *_SAMPLER, *_OTHERS, "run_name"))
TRL = Rules("trl", _NAMES, (_batch, _loss, _sampler, _others), _different)
