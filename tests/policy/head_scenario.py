"""Loss and full gradient of one mini-batch by both heads, in every rank of one job; rank 0 returns what tests compare.

A scenario is {"family": ..., "preset": ..., "objective": {...}, "policy": {...}, "correction": {...}, "traced": true,
"own": true}, all of it optional; `traced` asks for token diagnostics, `own` for a user's objective.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import CorrectionConfig, PolicyConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import ObjectiveInputs, ObjectiveOutput, PolicyObjective, summarize
from ctpo_megatron.policy import (
    MiniBatch,
    Trainer,
    apply_correction,
    function_gradient,
    init_distributed,
    policy_gradient,
    supervised,
)
from tests.policy import models


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The same by either head."""
    found = {}
    for head in ("logits", "streaming"):
        found[head] = by_head(model, head, settings)
        mpu.destroy_model_parallel()
    return found


def by_head(model: Path, head: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Metrics, old log-probs, token diagnostics and the gradient by Hugging Face name, over all ranks."""
    config = PolicyConfig(timeout_minutes=2.0, micro_batch_tokens=256, head=head, **settings.get("policy", {}))
    policy = Trainer(config, init_distributed(config, seed=0), model, temperature=0.9)
    (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
    anchor = policy.compute_old_log_probs([mini_batch])
    log_probs = [micro.old_log_probs for micro in mini_batch.micro_batches]
    if correction := settings.get("correction"):
        anchor |= corrected(policy, mini_batch, CorrectionConfig(**correction))
    for micro in mini_batch.micro_batches:
        move_anchor(micro)
    preset = settings.get("preset", "ctpo")
    objective = None if preset == "supervised" else PolicyObjective.preset(preset, **settings.get("objective", {}))
    if objective is None:
        loss = supervised()
    elif settings.get("own"):
        loss = function_gradient(mean_of_sequences, objective, "decoupled")
    else:
        loss = policy_gradient(objective, "decoupled")
    stats, gradients = policy.gradients(mini_batch, loss)
    gradient = {name: tensor.clone() for name, tensor in gradients}
    traced = policy.token_diagnostics(mini_batch, PolicyObjective.preset("ctpo")) if settings.get("traced") else {}
    return {
        "metrics": summarize(stats) | anchor,
        "log_probs": log_probs,
        "gradient": gradient,
        "diagnostics": traced,
        "mini_batch": mini_batch,
    }


def mean_of_sequences(inputs: ObjectiveInputs) -> ObjectiveOutput:
    """-A exp(mean of d over the sequence), whose gradient reaches every token: it needs whole sequences."""
    d = torch.where(inputs.response_mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    lengths = inputs.cu_seqlens.diff().long()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    table = torch.zeros(len(lengths), 2).index_add(0, sequence, torch.stack([d, inputs.response_mask.float()], 1))
    ratio = (table[:, 0] / table[:, 1].clamp(min=1)).exp()[sequence]
    return ObjectiveOutput(-inputs.advantages * ratio, {"ratio": ratio})


def corrected(policy: Trainer, mini_batch: MiniBatch, config: CorrectionConfig) -> dict[str, float]:
    """As if a sampler that differs a little had sampled the mini-batch."""
    for micro in mini_batch.micro_batches:
        if micro.old_log_probs is not None:
            noise = torch.cos(micro.token_ids * 5.0 + micro.position_ids)
            micro.rollout_log_probs = micro.old_log_probs + 0.05 * noise - 0.01
    return apply_correction([mini_batch], config, policy.layout, PolicyObjective.preset("ctpo"))


def move_anchor(micro: PackedBatch) -> None:
    """Differences between the policies that depend on the token alone, large enough to meet every bound."""
    if micro.old_log_probs is not None:  # None before the last pipeline stage
        micro.old_log_probs = micro.old_log_probs + 0.08 * torch.sin(micro.token_ids * 7.0 + micro.position_ids)
