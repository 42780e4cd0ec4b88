"""Builds models under layouts, in every rank of one job; rank 0 returns bytes counted and bytes computed.

A scenario is {"family": ..., "policy": {...}, "fused": ...}, all optional. fused: activations are kept as on CUDA.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.plan import (
    Split,
    layer_activations,
    stage_memory,
)
from ctpo_megatron.policy import Trainer, device, gather_objects, init_distributed, policy_gradient
from tests.policy import models


def count(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_bytes(policy: Trainer) -> int:
    """Adam's moments, and the float32 copies where the model's own weights are not float32."""
    optimizers = getattr(policy._steps.optimizer, "chained_optimizers", [policy._steps.optimizer])
    found = 0
    for optimizer in optimizers:
        for parameter, state in optimizer.optimizer.state.items():
            found += count((state["exp_avg"], state["exp_avg_sq"]))
            found += count((parameter,)) if policy.config.dtype == "bfloat16" else 0
    return found


def saved_bytes(policy: Trainer, step: Any) -> int:
    """Memory that autograd keeps for the backward pass of an optimizer step, without the weights."""
    weights = {p.untyped_storage().data_ptr() for chunk in policy._model.gpt for p in chunk.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.update(step, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
    return sum(kept.values())


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    exact = {"micro_batch_tokens": 2048, "share_prefixes": "off"}  # the sums are of tokens
    config = PolicyConfig(timeout_minutes=2.0, **exact, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    flags = device.transformer_flags(te_layers=False, experts=False)
    if settings.get("fused"):
        flags |= {"bias_activation_fusion": True, "bias_dropout_fusion": True}
    with mock.patch.object(device, "transformer_flags", lambda **_: flags):
        policy = Trainer(config, layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-4), total_steps=2)
    batch = [copy.deepcopy(models.trajectories(1)[0]) for _ in range(8)]  # one length: attention pads nothing
    (step,) = policy.distribute(batch, models.advantages(8), size=8)
    policy.compute_old_log_probs([step])
    saved = saved_bytes(policy, step)
    parameters = [p for chunk in policy._model.gpt for p in chunk.parameters()]
    split = Split.of(config, layout.world_size)
    expected = stage_memory(policy.spec, split, layout.pp_rank)
    mine = {
        "weights": (count(parameters), expected.weights),
        "gradients": (count(p.main_grad for p in parameters), expected.gradients),
        "optimizer": (optimizer_bytes(policy), expected.optimizer),
    }
    tokens = sum(len(t.token_ids) for t in batch) / layout.dp_size
    layers = policy.spec.num_layers // layout.pp_size
    per_token = layer_activations(policy.spec, split)
    kept = per_token["input"] if config.recompute == "full" else sum(per_token.values())
    return {"ranks": gather_objects(mine), "activations": (saved, tokens * layers * kept)}
