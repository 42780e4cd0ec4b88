"""One rank of a job that runs layouts in sequence: `python -m ctpo_megatron.verify.job FOLDER NAME...`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from torch import Tensor

from ctpo_megatron.base.files import aside
from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.objective import summarize
from ctpo_megatron.policy import (
    Layout,
    Trainer,
    destroy_distributed,
    gather_objects,
    gather_positions,
    init_distributed,
    policy_gradient,
)
from ctpo_megatron.verify.layouts import LAYOUTS, OBJECTIVES, is_by_turn


def run(layout: Layout, config: PolicyConfig, work: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, losses and gradients of one layout, the same on every rank; statistics by position on rank zero."""
    policy = Trainer(config, layout, Path(work["model"]), temperature=work["temperature"], family=work["family"])
    trajectories, advantages = work["trajectories"], work["advantages"]
    wanted = {is_by_turn(name) for name in work["objectives"]}
    steps = {
        by_turn: policy.distribute(trajectories, advantages[by_turn], len(trajectories), by_turn=by_turn)
        for by_turn in sorted(wanted)
    }
    for step in steps.values():
        policy.compute_old_log_probs(step)  # to be compared; the anchor is "behaviour"
    (mini_batch,) = steps[min(wanted)]
    keys = [(trajectory.prompt_id, trajectory.sample_index) for trajectory in trajectories]
    local: dict[tuple[str, int], Tensor] = {}
    for micro in mini_batch.micro_batches if layout.reports else []:
        assert micro.old_log_probs is not None  # just computed
        local |= {keys[number]: micro.old_log_probs[place].cpu() for number, place in micro.places()}
    log_probs = {key: values for part in gather_objects(local) for key, values in part.items()}
    loss, gradient, positions = {}, {}, {}
    for name in work["objectives"]:
        objective = OBJECTIVES[name]
        (mini_batch,) = steps[is_by_turn(name)]
        stats, exported = policy.gradients(mini_batch, policy_gradient(objective, "behaviour"))
        loss[name] = summarize(stats)["actor/pg_loss"]
        gradient[name] = {tensor_name: tensor.cpu().clone() for tensor_name, tensor in exported}
        if (of_step := gather_positions([mini_batch], objective, "behaviour", layout)) is not None:
            positions[name] = of_step.whole
    return {"log_probs": log_probs, "loss": loss, "gradient": gradient, "positions": positions}


def main(folder: Path, names: list[str]) -> None:
    """Run the layouts; rank 0 writes `NAME.pt` for each."""
    work = pickle.loads((folder / "work.pickle").read_bytes())
    for name in names:
        fields = {key: work[key] for key in ("micro_batch_tokens", "dtype")} | LAYOUTS[name].policy
        config = PolicyConfig(timeout_minutes=5.0, **fields)
        layout = init_distributed(config, seed=0)
        found = run(layout, config, work)
        gather_objects(None)  # so that the file implies that every rank is done
        if layout.rank == 0:
            with aside(folder / f"{name}.pt") as written:
                torch.save(found, written)
        mpu.destroy_model_parallel()
    destroy_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
