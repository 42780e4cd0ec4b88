"""Training scenarios, run one after another by every rank of one job; rank 0 writes what the tests compare.

python start_scenario.py scenario MODELS OUTPUT '{"name": {"family": ..., "policy": {...}, "save": DIR, ...}, ...}'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Policy, destroy_distributed, init_distributed, policy_gradient, summarize_updates

MEASURED = ("time/", "memory/")
"""Metrics that are never the same twice."""


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train for a few RL steps on recorded trajectories; every rank returns metrics and full weights."""
    config = PolicyConfig(timeout_minutes=2.0, micro_batch_tokens=256, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Policy(config, layout, model, temperature=0.9)
    policy.use_optimizer(OptimizerConfig(lr=1e-3, schedule="linear", betas=(0.9, 0.95)), total_steps=20)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    done = policy.load(Path(settings["load"]))["step"] if "load" in settings else 0
    loss = policy_gradient(PolicyObjective.preset(settings.get("preset", "ctpo")), "proximal")
    steps, measured = [], []
    for step in range(done, settings.get("steps", 2)):
        mini_batches = policy.mini_batches(models.trajectories(seed=step), models.advantages(), size=8)
        metrics = policy.compute_old_log_probs(mini_batches)
        metrics |= summarize_updates([policy.update(m, loss) for m in mini_batches])
        steps.append({name: value for name, value in metrics.items() if not name.startswith(MEASURED)})
        measured.append({name: value for name, value in metrics.items() if name.startswith(MEASURED)})
        policy.release()
        if "save" in settings and step == 0:
            how = CheckpointConfig(asynchronous=settings.get("asynchronous", False))
            policy.save(Path(settings["save"]), 1, {"step": 1}, how)
    policy.finish_save()
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    return {"steps": steps, "measured": measured, "before": before, "weights": weights}


def main(models_dir: Path, output: Path, scenarios: dict[str, dict[str, Any]]) -> None:
    results = {}
    for name, settings in scenarios.items():
        results[name] = run(models_dir / settings.get("family", "qwen3-tied"), settings)
        mpu.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(results, output)
    destroy_distributed()
