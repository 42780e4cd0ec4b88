"""Rules for a job of verl.

Sources: `core_algos.py` for losses and advantages, `rollout_corr_helper.py` for the sampler, `trainer_base.py` for
steps, the optimizers of both engines for the warmup (verl 0.9.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.init.peer_job import RESPONSE_KEY, Row, Rules, preset
from ctpo_megatron.init.prompts import InitError

_NAMES = """
data.train_batch_size data.max_response_length trainer.total_training_steps trainer.total_epochs
actor.ppo_mini_batch_size actor.ppo_epochs actor.optim.lr_warmup_steps actor.optim.lr_warmup_steps_ratio
algorithm.adv_estimator actor.policy_loss.loss_mode actor.loss_agg_mode actor.loss_scale_factor
actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high actor.clip_ratio_c actor.tau_pos actor.tau_neg
algorithm.rollout_correction.rollout_is algorithm.rollout_correction.bypass_mode algorithm.rollout_correction.loss_type
rollout.top_k actor.megatron.sequence_parallel actor.use_dynamic_bsz actor.ppo_max_token_len_per_gpu
trainer.n_gpus_per_node trainer.save_freq trainer.test_freq trainer.logger data.val_files
"""
_MODES = ("vanilla", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl")
_TRACKERS = ("tensorboard", "wandb", "mlflow")


def _batch(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sizes of a batch in prompts, and what verl counts in batches."""
    prompts, mini_batch = job["data.train_batch_size"], job["actor.ppo_mini_batch_size"]
    if prompts % mini_batch:
        raise InitError(f"--from: train_batch_size={prompts} is no multiple of ppo_mini_batch_size={mini_batch}")
    steps = job["trainer.total_training_steps"] or job["rows"] // prompts * job["trainer.total_epochs"]
    if not steps:
        raise InitError(f"--from: {job['rows']:,} rows are no whole batch of data.train_batch_size={prompts}")
    warmup, passes = job["actor.optim.lr_warmup_steps"] or 0, job["actor.ppo_epochs"]
    batches = warmup if warmup > 0 else int(job["actor.optim.lr_warmup_steps_ratio"] * steps)
    yield "rollout.prompts_per_step", prompts
    yield "policy.mini_batch_prompts", mini_batch
    yield "run.steps", steps
    yield "policy.passes_per_batch", passes
    yield "policy.optimizer.warmup_steps", batches * passes * (prompts // mini_batch)
    yield RESPONSE_KEY, job["data.max_response_length"]


def _advantages(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kind, samples = job["algorithm.adv_estimator"], job["rollout.n"]
    if kind not in ("grpo", "rloo"):
        raise InitError(f"--from: adv_estimator={kind!r} is not here; there are grpo and rloo, without a critic")
    if samples < 2:
        raise InitError(f"--from: rollout.n={samples}: a group of one has no advantage here; set 2 or more")
    yield "objective.advantage.kind", "group" if kind == "grpo" else kind


def _loss(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The loss, and the correction for what is between sampler and trainer."""
    mode, mean, factor = job["actor.policy_loss.loss_mode"], job["actor.loss_agg_mode"], job["actor.loss_scale_factor"]
    level, is_bypassed = (job[f"algorithm.rollout_correction.{name}"] for name in ("rollout_is", "bypass_mode"))
    if is_bypassed:  # that replaces the loss, and weights have no effect
        mode = job["algorithm.rollout_correction.loss_type"].replace("ppo_clip", "vanilla")
        yield "objective.anchor", "behaviour"
    elif level:
        yield "objective.anchor", "decoupled"
        yield "objective.correction.level", level
    # Without a factor, verl divides by the width of a micro-batch.
    norm = ("seq-mean-token-sum-norm",) if factor else ()
    if mode not in _MODES or mean not in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", *norm):
        raise InitError(
            f"--from: loss_mode={mode!r} with loss_agg_mode={mean!r} and loss_scale_factor={factor} is not among the "
            f"objectives here; there are {', '.join(_MODES)} (docs/objective.md)"
        )
    low, high = (job[f"actor.clip_ratio_{side}"] for side in ("low", "high"))
    fields = {
        "clip_low": job["actor.clip_ratio"] if low is None else low,
        "clip_high": job["actor.clip_ratio"] if high is None else high,
        "loss_agg_mode": mean.removesuffix("-norm"),
        "loss_scale_factor": factor if mean in norm else 1.0,
    }
    if mode in ("vanilla", "dppo_tv", "dppo_kl"):
        fields["clip_c"] = job["actor.clip_ratio_c"]
    if mode == "sapo":
        fields = {"tau_positive": job["actor.tau_pos"], "tau_negative": job["actor.tau_neg"]}
    yield from preset("grpo-verl" if mode == "vanilla" else mode.replace("_", "-"), **fields)


def _others(job: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    ranks = job["actor.megatron.tensor_model_parallel_size"]
    yield "policy.sequence_parallel", job["actor.megatron.sequence_parallel"] and ranks > 1
    if job["actor.use_dynamic_bsz"]:
        yield "policy.micro_batch_tokens", job["actor.ppo_max_token_len_per_gpu"]
    yield "placement.mode", "colocated"
    yield "placement.trainer_gpus", job["trainer.n_gpus_per_node"]
    yield "placement.engine_gpus", job["trainer.n_gpus_per_node"]
    yield "checkpoint.every", max(0, job["trainer.save_freq"])
    yield "eval.every", max(0, job["trainer.test_freq"])
    files = job["data.val_files"]
    held_out = [files] if isinstance(files, str) else list(files or ())
    if held_out and all(Path(file).is_file() for file in held_out):
        yield "data.eval", held_out
    yield "rollout.top_k", max(0, job["rollout.top_k"])
    yield "tracking.trackers", [name for name in job["trainer.logger"] if name in _TRACKERS]


def _different(job: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[Row]:
    schedules = {job["actor.optim.lr_decay_style"], job["actor.optim.lr_scheduler_type"]}
    moves = ours["policy.optimizer.warmup_steps"] > 0 or schedules != {"constant"}
    if moves and ours["rollout.prompts_per_step"] > ours["policy.mini_batch_prompts"]:
        yield "the learning rate", "policy.optimizer", "differs: verl changes it once a batch, here every update does"


_PARTS = (_advantages, _batch, _loss, _others)
VERL = Rules("verl", frozenset(_NAMES.split()), _PARTS, _different, of=frozenset({"", "ppo_trainer"}))
