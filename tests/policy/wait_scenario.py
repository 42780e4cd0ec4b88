"""Rank 0 works alone for longer than a collective may take, then all exchange something: `start_scenario.py`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import destroy_distributed, gather_objects, init_distributed


def _work(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def main(models_dir: Path, output: Path, settings: dict[str, Any]) -> None:
    layout = init_distributed(PolicyConfig(timeout_minutes=settings["timeout_s"] / 60), seed=0)
    found = gather_objects(layout.on_rank_zero(lambda: _work(settings["work_s"])))
    if layout.rank == 0:
        torch.save(found, output)
    destroy_distributed()
