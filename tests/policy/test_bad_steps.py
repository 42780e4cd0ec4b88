"""An optimizer step whose gradient is not finite changes nothing, on any rank; too many in a row end the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import (
    Layout,
    StepOutcome,
    Trainer,
    destroy_distributed,
    init_distributed,
    summarize_updates,
)
from tests.policy import models
from tests.policy.stepping import has_weights, step, weights
from tests.support import ranks

GOOD = models.advantages()
OVERFLOWING = [1e37] + [0.0] * 15
"""The loss is finite, the norm of the gradient is not; of several replicas only one sees it in its own trajectories."""
NAN = [math.nan] * 16


def start(layout: Layout, model: Path, settings: dict[str, Any]) -> Trainer:
    policy = Trainer(PolicyConfig(**settings), layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=4), total_steps=4)
    return policy


def skipped_and_left_out(model: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two good steps with a bad one between them, and the same two without it."""
    layout = init_distributed(PolicyConfig(**settings), seed=0)
    found = []
    for bad in (True, False):
        policy = start(layout, model, settings)
        step(policy, 0, GOOD)
        before = weights(policy)
        between = step(policy, 1, OVERFLOWING) if bad else None
        unchanged = has_weights(policy, before)
        if not bad:
            policy.set_scheduler_step(2 / 4)  # the schedule counts the steps that were tried
        last = step(policy, 2, GOOD)
        end = (last.grad_norm, last.learning_rate, last.applied)
        found.append({"bad": between, "unchanged": unchanged, "last": end, "weights": weights(policy)})
    destroy_distributed()
    return found


DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1),
        pytest.param({"dtype": "bfloat16"}, 1, marks=pytest.mark.slow),
        ({"dtype": "bfloat16", "timeout_minutes": 2.0} | DISTRIBUTED, 2),
    ],
    ids=["float32", "bfloat16", "bfloat16-distributed-2-ranks"],
)
def test_a_step_without_a_finite_gradient_is_as_if_it_had_not_been(
    model: Path, settings: dict[str, Any], count: int
) -> None:
    for with_bad, without in ranks.run(skipped_and_left_out, model, settings, ranks=count):
        between = with_bad["bad"]
        assert between.outcome is StepOutcome.BAD and between.grad_norm == math.inf and with_bad["unchanged"]
        assert with_bad["last"] == without["last"] and with_bad["last"][2]
        assert with_bad["last"][1] == 1e-3 * 2 / 4
        assert all(torch.equal(tensor, without["weights"][name]) for name, tensor in with_bad["weights"].items())


@pytest.mark.parametrize("bad", [OVERFLOWING, NAN], ids=["gradient", "loss"])
def test_bad_steps_in_a_row_end_the_run_and_a_good_one_in_between_counts_anew(
    layout: Layout, model: Path, bad: list[float]
) -> None:
    policy = start(layout, model, {"max_bad_steps": 2})
    found = [step(policy, seed, advantages) for seed, advantages in enumerate([bad, GOOD, bad])]
    assert [each.outcome for each in found] == [StepOutcome.BAD, StepOutcome.APPLIED, StepOutcome.BAD]
    with pytest.raises(FloatingPointError, match=r"is not finite .* as 2 in a row now \(policy\.max_bad_steps\)"):
        step(policy, 3, bad)


def test_metrics_count_bad_steps_and_leave_them_out(layout: Layout, model: Path) -> None:
    policy = start(layout, model, {})
    good, bad = step(policy, 0, GOOD), step(policy, 1, NAN)
    alone, both = summarize_updates([good]), summarize_updates([bad, good])
    assert (alone["actor/bad_steps"], both["actor/bad_steps"]) == (0, 1)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/grad_norm_max", "pg_update/first_log_ratio_abs_max"):
        assert both[name] == alone[name]
    assert summarize_updates([bad])["actor/bad_steps"] == 1
