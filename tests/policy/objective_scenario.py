"""One update of a tiny policy by a configured objective, on one rank or as one of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import ObjectiveConfig, OptimizerConfig, PolicyConfig, objective_from_config
from ctpo_megatron.policy import (
    Layout,
    Trainer,
    apply_correction,
    configured_loss,
    destroy_distributed,
    init_distributed,
    summarize_updates,
)
from tests.policy import models


def one_update(layout: Layout, model: Path, objective: ObjectiveConfig, head: str) -> dict[str, Any]:
    """Metrics, and the weights after a step that follows the gradient in size too (AdamW with epsilon 1)."""
    config = PolicyConfig(head=head, micro_batch_tokens=256)
    policy = Trainer(config, layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1.0, eps=1.0, weight_decay=0.0), total_steps=1)
    (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
    policy.compute_old_log_probs([mini_batch])
    apply_correction([mini_batch], objective.correction, layout, objective_from_config(objective))
    update = policy.update(mini_batch, configured_loss(objective))
    return {"metrics": summarize_updates([update]), "weights": {n: w.clone() for n, w in policy.weights()}}


def on_every_rank(model: Path, objective: ObjectiveConfig, folder: Path) -> dict[str, Any]:
    """The same as one of several ranks; the user's file is in `folder`."""
    activate([folder])
    layout = init_distributed(PolicyConfig(), seed=0)
    try:
        return one_update(layout, model, objective, "streaming")
    finally:
        destroy_distributed()
