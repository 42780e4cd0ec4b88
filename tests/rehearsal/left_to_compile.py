"""What a rank's warm-up compiles, and what its steps would still have to compile, on a pretended GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.aot_launches import recorded
from ctpo_megatron.config import ObjectiveConfig, objective_from_config
from ctpo_megatron.policy import MiniBatch, Trainer, destroy_distributed, init_distributed, policy_gradient, supervised
from tests.policy import models
from tests.rehearsal.cases import Case
from tests.rehearsal.job import config_of
from tests.support.backends import use_backend

TRAJECTORIES = 8


def left_to_compile(case: Case, objectives: list[ObjectiveConfig], model: Path) -> tuple[set[str], list[str]]:
    """Kernels that the steps of a run launch, and those launches that the warm-up for their objective had not made.

    Launches are noted, not made: the numbers of a step are those that its memory held before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # as tests/conftest.py has imported the rest of Triton
        import triton.experimental.gluon  # noqa: F401  # which Triton imports where it tells launches apart

    layout = init_distributed(config_of(case), seed=0)
    try:
        on = Trainer(config_of(case), layout, model, temperature=0.9)
        with use_backend("triton"):
            kernels: set[str] = set()
            missing = []
            for objective in objectives:
                warmed = {launch.key for launch in recorded(functools.partial(on.compile_kernels, objective), "")}
                for name, step in _steps(on, objective).items():
                    launches = recorded(step, name)
                    kernels |= {launch.kernel for launch in launches}
                    left = [launch.kernel for launch in launches if launch.key not in warmed]
                    missing += [f"{objective.preset}, {name}: {kernel}" for kernel in left]
    finally:
        destroy_distributed()
    return kernels, missing


def _steps(on: Trainer, objective: ObjectiveConfig) -> dict[str, Callable[[], Any]]:
    """Passes over batches of several sizes, as a run makes them."""
    loss = policy_gradient(objective_from_config(objective), "proximal")

    def batch(number: int, *, on_policy: bool = False) -> MiniBatch:
        trajectories = models.trajectories(TRAJECTORIES, seed=number)
        (mini,) = on.distribute(trajectories, models.advantages(TRAJECTORIES), size=TRAJECTORIES)
        for micro in mini.micro_batches:
            micro.on_policy = on_policy
        return mini

    def usual() -> None:
        mini = batch(0)
        on.compute_old_log_probs([mini])
        if objective.correction.level != "none":
            for micro in mini.micro_batches:
                micro.correction_weights = micro.rollout_log_probs + 1.0
        on.gradients(mini, loss)

    return {
        "update": usual,
        "first update": lambda: on.gradients(batch(1, on_policy=True), loss),
        "supervised": lambda: on.gradients(batch(2), supervised()),
    }
