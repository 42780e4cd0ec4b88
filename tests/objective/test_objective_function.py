"""The door for a user's objective: what a function gets, what may come back, and the same loss as the built-in one."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_megatron.base.extensions import ExtensionError, activate
from ctpo_megatron.config import Extension
from ctpo_megatron.objective import (
    Denominators,
    ObjectiveInputs,
    ObjectiveOutput,
    PolicyObjective,
    function_loss,
    load_objective,
    merge,
    objective_problem,
    policy_loss,
    summarize,
)
from tests.objective.objective_reference import packed, random_batch

LENGTHS = [9, 0, 12, 5, 7, 3]


def grpo(inputs: ObjectiveInputs, *, low: float = 0.2, high: float = 0.2) -> ObjectiveOutput:
    ratio, a = (inputs.log_probs - inputs.old_log_probs).exp(), inputs.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    loss = torch.where(a < 0, torch.minimum(loss, -a * 3), loss)
    tokens = torch.ones(())
    return ObjectiveOutput(loss, {"ratio": ratio, "calls": (tokens, 2.0)})


def inputs_of(batch: list[Any], step: Denominators) -> ObjectiveInputs:
    """A micro-batch as the policy hands it over."""
    given = packed(batch)
    model = given["response_mask"].bool()
    return ObjectiveInputs(
        log_probs=torch.where(model, given["log_probs"], 0.0).requires_grad_(),
        old_log_probs=given["old_log_probs"],
        rollout_log_probs=given["old_log_probs"],
        advantages=given["advantages"],
        response_mask=model,
        loss_mask=given["loss_mask"].bool(),
        cu_seqlens=given["cu_seqlens"],
        denominators=step,
    )


def step_of(batch: list[Any]) -> Denominators:
    return Denominators.of(packed(batch)["loss_mask"], packed(batch)["cu_seqlens"])


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("cuts", [[0, 6], [0, 1, 4, 6]])
def test_token_losses_give_the_built_in_loss_however_the_step_is_cut(mode: str, cuts: list[int]) -> None:
    batch = random_batch(3, LENGTHS, 0.5)
    objective = PolicyObjective.preset("grpo", loss_agg_mode=mode, loss_scale_factor=4.0)
    parts = [inputs_of(batch[a:b], step_of(batch)) for a, b in itertools.pairwise(cuts)]
    found = [function_loss(grpo, part, objective) for part in parts]
    for output in found:
        output.loss.backward()
    whole = {name: value for name, value in packed(batch).items() if name != "weights"}
    log_probs = whole["log_probs"].clone().requires_grad_()
    expected = policy_loss(**{**whole, "log_probs": log_probs}, objective=objective)
    expected.loss.backward()
    torch.testing.assert_close(sum(output.loss for output in found), expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([p.log_probs.grad for p in parts]), log_probs.grad, rtol=1e-9, atol=1e-12)
    metrics, built_in = summarize(merge([output.stats for output in found])), summarize(expected.stats)
    assert metrics["actor/pg_loss"] == pytest.approx(built_in["actor/pg_loss"], rel=1e-9)
    assert metrics["actor/ppo_kl"] == pytest.approx(built_in["actor/ppo_kl"], rel=1e-9)
    assert metrics["objective/ratio"] == pytest.approx(built_in["pg_update/is_ratio/mean"], rel=1e-9)
    assert metrics["objective/calls"] == 0.5, "a pair is a sum and a count"
    assert not any(name.startswith("pg_update/clip") for name in metrics), "a user's objective has no clip of ours"


def test_a_scalar_is_this_micro_batchs_share() -> None:
    batch = random_batch(5, LENGTHS, 0.1)

    def mean(inputs: ObjectiveInputs) -> Tensor:
        return -(inputs.log_probs * inputs.advantages * inputs.loss_mask).sum() / inputs.denominators.tokens

    objective, step = PolicyObjective(), step_of(batch)
    whole = function_loss(mean, inputs_of(batch, step), objective)
    parts = [function_loss(mean, inputs_of(part, step), objective).loss for part in (batch[:2], batch[2:])]
    assert whole.per_token is None
    torch.testing.assert_close(sum(parts), whole.loss)


def test_a_metric_that_only_some_micro_batches_report_is_added_up_over_those() -> None:
    batch = random_batch(5, LENGTHS, 0.1)

    def sometimes(inputs: ObjectiveInputs) -> ObjectiveOutput:
        long = inputs.log_probs.numel() > 20
        return ObjectiveOutput(inputs.log_probs, {"x": (6.0, 2)} if long else {})

    step = step_of(batch)
    stats = [
        function_loss(sometimes, inputs_of(part, step), PolicyObjective()).stats for part in (batch[:3], batch[3:])
    ]
    assert summarize(merge(stats))["objective/x"] == 3
    assert "objective/x" not in summarize(stats[1])


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda x: 3.0, TypeError, "returned float; expected a tensor"),
        (lambda x: x.log_probs[:2], ValueError, r"a loss of shape \[2\]; expected \[36\] or a scalar"),
        (lambda x: x.advantages, ValueError, "does not depend on log_probs"),
        (lambda x: ObjectiveOutput(x.log_probs, {"y": x.log_probs[:1]}), ValueError, r"'y' has shape \[1\]; expected"),
    ],
)
def test_other_results_are_refused(returned: Any, error: type[Exception], message: str) -> None:
    batch = random_batch(5, LENGTHS, 0.1)
    with pytest.raises(error, match=message):
        function_loss(returned, inputs_of(batch, step_of(batch)), PolicyObjective())


def test_values_at_masked_tokens_never_enter() -> None:
    batch = random_batch(5, LENGTHS, 0.1)
    inputs = inputs_of(batch, step_of(batch))
    spoilt = ~inputs.loss_mask

    def nan_where_masked(x: ObjectiveInputs) -> ObjectiveOutput:
        loss = torch.where(spoilt, torch.nan, x.log_probs)
        return ObjectiveOutput(loss, {"loss_value": loss})

    found = function_loss(nan_where_masked, inputs, PolicyObjective())
    assert found.loss.isfinite() and summarize(found.stats)["objective/loss_value"] < 0


async def waits(inputs: ObjectiveInputs) -> Tensor:
    return inputs.log_probs


@pytest.mark.parametrize(
    ("found", "arguments", "problem"),
    [
        (grpo, {}, ""),
        (grpo, {"low": 0.1}, ""),
        (grpo, {"lo": 0.1}, "cannot be called with (inputs, lo=...): got an unexpected keyword argument 'lo'"),
        (lambda: None, {}, "cannot be called with (inputs): too many positional arguments"),
        (3, {}, "is not a function"),
        (Denominators, {}, "is not a function"),
        (waits, {}, "is async"),
    ],
)
def test_what_is_no_objective_is_said_before_anything_starts(found: Any, arguments: dict, problem: str) -> None:
    said = objective_problem(found, arguments)
    assert said.startswith(problem) and bool(said) == bool(problem)


def test_a_file_outside_the_package_is_found_and_bound(tmp_path, monkeypatch) -> None:
    (tmp_path / "outside_objective.py").write_text("def scaled(inputs, *, factor):\n    return factor * inputs\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    activate([tmp_path])
    assert load_objective(Extension(name="outside_objective:scaled", arguments={"factor": 2.0}))(3) == 6
    with pytest.raises(ExtensionError, match=r"outside_objective:scaled cannot be called with .*'factor'"):
        load_objective(Extension(name="outside_objective:scaled"))


def test_the_example_of_the_documentation_runs(monkeypatch) -> None:
    folder = Path(__file__).parents[2] / "examples" / "objective"
    monkeypatch.setattr(sys, "path", [*sys.path])
    activate([folder])
    function = load_objective(Extension(name="soft_clip:soft_clip", arguments={"width": 0.1}))
    batch = random_batch(5, LENGTHS, 0.1)
    inputs = inputs_of(batch, step_of(batch))
    output = function_loss(function, inputs, PolicyObjective(loss_agg_mode="token-mean"))
    output.loss.backward()
    assert inputs.log_probs.grad[inputs.loss_mask].any() and not inputs.log_probs.grad[~inputs.loss_mask].any()
    assert summarize(output.stats)["objective/log_ratio_abs"] > 0
