"""Peak memory of handing weights on, in every rank of one job; rank 0 returns what each rank needed.

A scenario is {"family": ..., "shard_bytes": ..., "policy": {...}}; the policy is optional.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import Trainer, gather_objects, init_distributed, write_directory


def resident(field: str) -> int:
    (kib,) = re.findall(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) << 10


def peak_of(action: Callable[[], Any]) -> int:
    """Bytes by which the process grew at most while `action` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    action()
    return resident("VmHWM") - before


def run(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    config = PolicyConfig(timeout_minutes=2.0, **settings.get("policy", {}))
    layout = init_distributed(config, seed=0)
    policy = Trainer(config, layout, model, temperature=1.0)

    def sync() -> None:
        deque(policy.weights(), maxlen=0)

    sync()  # collectives allocate their own buffers when they are first used
    dist.barrier()
    found = {"sync": peak_of(sync)}
    dist.barrier()
    target, shard_bytes = model.with_name("exported"), settings["shard_bytes"]
    found["export"] = peak_of(lambda: write_directory(policy.weights(), model, target, layout, shard_bytes))
    return {"ranks": gather_objects(found)}
