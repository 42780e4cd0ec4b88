"""Training scenarios, run one after another by every rank of one job; rank 0 returns what the tests compare.

A scenario is {"family": ..., "policy": {...}, "save": DIR, "load": DIR, "preset": ..., "steps": ...}, all optional.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.config.schema import CheckpointConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    Trainer,
    init_distributed,
    policy_gradient,
    summarize_updates,
)
from tests.policy import models
from tests.policy.stepping import weights

MEASURED = ("time/", "memory/")
"""Metrics that are never the same twice."""


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train for a few RL steps on recorded trajectories; every rank returns metrics and full weights."""
    config = PolicyConfig(timeout_minutes=2.0, micro_batch_tokens=256, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=0.9)
    policy.use_optimizer(OptimizerConfig(lr=1e-3, schedule="linear", betas=(0.9, 0.95)), total_steps=20)
    before = weights(policy)
    done = policy.load(Path(settings["load"]))["step"] if "load" in settings else 0
    loss = policy_gradient(PolicyObjective.preset(settings.get("preset", "ctpo")), "proximal")
    steps, measured, first_norm = [], [], None
    for step in range(done, settings.get("steps", 2)):
        mini_batches = policy.distribute(models.trajectories(seed=step, groups=True), models.advantages(), size=8)
        metrics = policy.compute_old_log_probs(mini_batches)
        updates = [policy.update(m, loss) for m in mini_batches]
        first_norm = updates[0].grad_norm if step == 0 else first_norm
        metrics |= summarize_updates(updates)
        steps.append({name: value for name, value in metrics.items() if not name.startswith(MEASURED)})
        measured.append({name: value for name, value in metrics.items() if name.startswith(MEASURED)})
        policy.release()
        if "save" in settings and step == 0:
            how = CheckpointConfig(asynchronous=settings.get("asynchronous", False))
            policy.save(Path(settings["save"]), 1, {"step": 1}, how)
    policy.finish_save()
    found = {"steps": steps, "measured": measured, "before": before, "weights": weights(policy)}
    return found | {"first_norm": first_norm}
