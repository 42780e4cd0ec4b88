"""Megatron distributed checkpoints: written aside, published with a marker, pruned, found again."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ctpo_megatron.policy.model import BuiltModel

log = logging.getLogger(__name__)

MARKER = "COMPLETE.json"
_STEP = re.compile(r"step_(\d{6,})")


def _metadata() -> dict[str, Any]:
    return {
        # The default format can no longer be saved by megatron-core 0.16; this one reshards over TP, PP and DP.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _inner_adamw(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o.optimizer for o in chained if isinstance(o.optimizer, torch.optim.AdamW)]


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's AdamW the state a first step would make, so that there is something to load into."""
    for inner in _inner_adamw(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                state = inner.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Loading makes all parameters share one `step` tensor, which would then advance once per parameter."""
    for inner in _inner_adamw(optimizer):
        for state in inner.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()


def save(
    directory: Path,
    step: int,
    model: BuiltModel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    run_state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write `<directory>/step_%06d` on all ranks; it exists under that name only when complete.

    run_state: JSON-serializable state of the driver (the same on every rank). Older checkpoints beyond
    `keep_last` are removed afterwards. Raises OSError from the file system.
    """
    final = directory / f"step_{step:06d}"
    aside = directory / f".step_{step:06d}.writing"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    metadata = _metadata()
    weights = model.sharded_state(metadata)
    state = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
        "scheduler": scheduler.state_dict(),
    }
    dist_checkpointing.save(state, str(aside), content_metadata={"distrib_optim_sharding_type": "fully_reshardable"})
    dist.barrier()
    if first:
        (aside / MARKER).write_text(json.dumps({"step": step, "run": run_state}))
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        for old in complete(directory)[:-keep_last]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(p for p in directory.iterdir() if _STEP.fullmatch(p.name) and (p / MARKER).is_file())


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`; None when there is none."""
    found = complete(directory)
    return found[-1] if found else None


def read_run_state(checkpoint: Path) -> dict[str, Any]:
    """The driver's state as `save` was given it."""
    return json.loads((checkpoint / MARKER).read_text())["run"]


def load(checkpoint: Path, model: BuiltModel, optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> None:
    """Restore weights, optimizer and schedule from a complete checkpoint of any parallel layout.

    Raises megatron's CheckpointingException (strict) when keys or shapes differ from the model's.
    """
    _fill_state(optimizer)
    metadata = _metadata()
    weights = model.sharded_state(metadata)
    wanted = {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata),
    }
    loaded = dist_checkpointing.load(wanted, str(checkpoint), strict="raise_all")
    model.load_state(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(optimizer)
    scheduler.load_state_dict(loaded["scheduler"])
    log.info("restored %s", checkpoint)
