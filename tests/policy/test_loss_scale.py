"""float16: a gradient that overflows is no bad step, on any rank; the loss scale follows, and a resume has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.policy import (
    Layout,
    StepOutcome,
    Trainer,
    destroy_distributed,
    device,
    init_distributed,
    summarize_updates,
)
from tests.policy import models
from tests.policy.jobs import CP2, DISTOPT, EP2, OVERLAP, PP2, TP2
from tests.policy.stepping import has_weights, step, weights
from tests.support import ranks

TOO_LARGE = 2.0**24
"""At which these models overflow a few times, until it has been halved often enough."""
APPLIED, OVERFLOW, BAD = StepOutcome.APPLIED, StepOutcome.OVERFLOW, StepOutcome.BAD


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loss_scale")
    for family in ("qwen3-tied", "qwen3-moe-decided"):
        models.build(family, root / family, layers=2)
    return root


def start(layout: Layout, model: Path, **settings: Any) -> Trainer:
    config = PolicyConfig(**{"dtype": "float16", "timeout_minutes": 2.0, "micro_batch_tokens": 256, **settings})
    policy = Trainer(config, layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-3, warmup_steps=16), total_steps=16)
    return policy


@pytest.fixture(scope="module")
def scale(layout: Layout, folder: Path) -> Any:
    """The loss scale of a trainer, which begins at 16."""
    return start(layout, folder / "qwen3-tied", initial_loss_scale=2.0**4)._model.loss_scale


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_the_scale_is_megatrons_and_follows_steps_alone(scale: Any, overflows: list[bool], optimizers: int) -> None:
    ours = scale
    with device.scope():
        ours.restart()
        theirs = DynamicGradScaler(2.0**4, 1.0, 2.0, 0.5, 1000, 2)
        for overflow in overflows:
            for number in range(optimizers):  # each reports what it found; the last of them nothing
                ours.update(overflow and number + 1 < optimizers)
            ours.note(overflow=overflow)
            theirs.update(overflow)
        assert ours.value == float(ours.scale) == float(theirs.scale)
        assert ours.state_dict() == theirs.state_dict()


def test_a_loss_scale_is_doubled_after_a_thousand_steps_and_restarts(scale: Any) -> None:
    with device.scope():
        scale.restart()
        fresh = scale.state_dict()
        for overflow in [True, True] + [False] * 1000:
            scale.note(overflow=overflow)
        assert scale.value == 2.0**4
        scale.note(overflow=True)  # patient again
        assert scale.value == 2.0**4
        scale.restart()
        assert scale.state_dict() == fresh


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for _, tensor in sorted(tensors.items())])


def steps_of(model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Steps from a scale that is too large to the second that is applied, and the same from one that is not."""
    layout = init_distributed(PolicyConfig(**{"dtype": "float16", **settings}), seed=0)
    policy = start(layout, model, initial_loss_scale=TOO_LARGE, max_bad_steps=1, **settings)
    before, found, unchanged = weights(policy), [], []
    while len(found) < 16 and (not found or not found[-1].applied):
        found.append(step(policy, seed=0))
        unchanged.append(has_weights(policy, before))
    fitting = start(layout, model, **settings)
    fitting.set_scheduler_step((len(found) - 1) / 16)  # the schedule counts the steps that were tried
    first = step(fitting, seed=0)
    after = weights(policy), weights(fitting)
    destroy_distributed()
    return {"found": found, "unchanged": unchanged, "first": first, "before": before, "after": after}


LAYOUTS = {
    "one": ("qwen3-tied", 1, {}),
    "one-logits": ("qwen3-tied", 1, {"head": "logits"}),
    "one-moe": ("qwen3-moe-decided", 1, {}),
    "tp2": ("qwen3-tied", 2, TP2),
    "pp2": ("qwen3-tied", 2, PP2),
    "cp2": ("qwen3-tied", 2, CP2 | DISTOPT),
    "dp2": ("qwen3-tied", 2, {}),
    "dp2-distopt": ("qwen3-tied", 2, DISTOPT | OVERLAP),
    "moe-ep2": ("qwen3-moe-decided", 2, EP2 | DISTOPT),
}


USUAL = ("dp2-distopt",)
"""Of `make test`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in LAYOUTS]
)
def test_overflows_change_nothing_and_lower_the_scale_on_all_ranks(folder: Path, name: str) -> None:
    family, count, settings = LAYOUTS[name]
    for result in ranks.run(steps_of, folder / family, settings, ranks=count):
        found, first = result["found"], result["first"]
        assert [each.outcome for each in found] == [OVERFLOW] * (len(found) - 1) + [APPLIED] and len(found) > 2
        # megatron-core waits for the second overflow, then halves at each.
        assert [each.loss_scale for each in found] == [TOO_LARGE / 2 ** max(0, n - 1) for n in range(len(found))]
        assert result["unchanged"][:-1] == [True] * (len(found) - 1) and first.applied
        assert all(math.isinf(each.grad_norm) for each in found[:-1])
        assert found[-1].grad_norm == pytest.approx(first.grad_norm, rel=2e-3)
        assert found[-1].learning_rate == first.learning_rate
        ours, theirs = (flat(tensors) for tensors in result["after"])
        assert (ours - theirs).norm() < 0.05 * (theirs - flat(result["before"])).norm()  # Adam's state is fresh in both


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3-tied", {}, marks=pytest.mark.slow, id="one optimizer"),
        pytest.param("qwen3-tied", DISTOPT, id="distributed"),
        pytest.param("qwen3-moe-decided", DISTOPT, marks=pytest.mark.slow, id="two optimizers"),
    ],
)
def test_the_scale_of_a_checkpoint_continues_bit_for_bit(
    layout: Layout, folder: Path, tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """An overflow comes before the save, and others after it."""
    policy = start(layout, folder / family, initial_loss_scale=TOO_LARGE, **settings)
    saved_after = 3
    outcomes = [step(policy, seed).outcome for seed in range(saved_after)]
    assert outcomes[:2] == [OVERFLOW, OVERFLOW]
    path = policy.save(tmp_path, saved_after, {"step": saved_after})
    expected = [step(policy, seed) for seed in range(saved_after, 7)]
    assert {OVERFLOW, APPLIED} >= {each.outcome for each in expected} and expected[-1].applied
    resumed = start(layout, folder / family, **settings)  # the initial scale is not what counts
    resumed.load(path)
    found = [step(resumed, seed) for seed in range(saved_after, 7)]
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("outcome", "grad_norm", "learning_rate", "loss_scale"):
            assert getattr(ours, name) == getattr(theirs, name), name
    scales = [trainer._model.loss_scale for trainer in (resumed, policy)]
    assert scales[0].state_dict() == scales[1].state_dict()
    assert has_weights(resumed, weights(policy))


BEYOND_ALL_SCALES = [1e37] + [0.0] * 15
NAN = [math.nan] * 16


def test_only_what_no_scale_can_help_is_a_bad_step(layout: Layout, folder: Path) -> None:
    policy = start(layout, folder / "qwen3-tied", initial_loss_scale=2.0, max_bad_steps=2)
    found = [step(policy, 0, advantages) for advantages in (BEYOND_ALL_SCALES, NAN, BEYOND_ALL_SCALES)]
    assert [each.outcome for each in found] == [OVERFLOW, BAD, OVERFLOW]
    assert [each.loss_scale for each in found] == [2, 2, 2]  # a loss that is not finite says nothing of it
    with pytest.raises(FloatingPointError, match=r"as 2 in a row now \(policy\.max_bad_steps\)"):
        step(policy, 0, BEYOND_ALL_SCALES)  # at the smallest scale; the overflow between the two is no good step


def test_metrics_count_overflows_apart_and_leave_them_out(layout: Layout, folder: Path) -> None:
    policy = start(layout, folder / "qwen3-tied")
    good, overflow, bad = step(policy, 0), step(policy, 1, BEYOND_ALL_SCALES), step(policy, 2, NAN)
    alone, both = summarize_updates([good]), summarize_updates([overflow, good])
    assert (alone["actor/overflow_steps"], both["actor/overflow_steps"]) == (0, 1)
    assert both["actor/bad_steps"] == 0 and both["actor/loss_scale"] == 2.0**16
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/grad_norm_max", "pg_update/first_log_ratio_abs_max"):
        assert both[name] == alone[name]
    only = summarize_updates([overflow])
    assert only["actor/overflow_steps"] == 1 and "actor/grad_norm" not in only and "actor/grad_norm_max" not in only
    assert summarize_updates([bad, overflow])["actor/bad_steps"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_have_no_loss_scale(layout: Layout, folder: Path, dtype: str) -> None:
    policy = start(layout, folder / "qwen3-tied", dtype=dtype)
    metrics = summarize_updates([step(policy, 0)])
    assert not metrics.keys() & {"actor/overflow_steps", "actor/loss_scale"} and policy._model.loss_scale is None
