"""Runs the scenarios of this folder as a job of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from ctpo_megatron.policy import destroy_distributed
from tests.support import ranks as pool

TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTOPT = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
"""Settings of the policy that divide it over two ranks, and its optimizer."""
Results = dict[str, dict[str, Any]]
Scenarios = dict[str, dict[str, Any]]
Run = Callable[[Path, dict[str, Any]], dict[str, Any]]
"""A scenario on a rank: the model's directory, and settings."""


def run_job(run: Run, models_dir: Path, ranks: int, scenarios: Scenarios) -> Results:
    """Run scenarios one after another on `ranks` processes of one thread each; what rank 0 returned, by scenario."""
    results: Results = pool.run(run_on_rank, run, models_dir, scenarios, ranks=ranks)[0]
    return results


def run_on_rank(run: Run, models_dir: Path, scenarios: Scenarios) -> Results | None:
    """The part of one rank; rank 0 returns results. A scenario names its model by `family`."""
    results = {}
    for name, settings in scenarios.items():
        results[name] = run(models_dir / settings.get("family", "qwen3-tied"), settings)
        mpu.destroy_model_parallel()
    rank = dist.get_rank()
    destroy_distributed()
    return results if rank == 0 else None


class Jobs:
    """Results by scenario; a job runs once, with all of its scenarios, when the first of them is asked for."""

    def __init__(self, run: Callable[[Scenarios], Results], *jobs: Scenarios) -> None:
        self._run = run
        self._jobs = [(scenarios, Future[Results]()) for scenarios in jobs]

    def __getitem__(self, name: str) -> dict[str, Any]:
        scenarios, results = next(job for job in self._jobs if name in job[0])
        if not results.done():
            try:
                results.set_result(self._run(scenarios))
            except Exception as failure:
                results.set_exception(failure)
        return results.result()[name]
