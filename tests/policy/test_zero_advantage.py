"""Trajectories without an advantage stay out of the passes, and nothing that is learned changes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from ctpo_megatron.config import PRESETS, Config, OptimizerConfig, PolicyConfig
from ctpo_megatron.data import Trajectory
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    MiniBatch,
    Trainer,
    destroy_distributed,
    gather_positions,
    init_distributed,
    policy_gradient,
    summarize_updates,
)
from tests.policy import models
from tests.policy.jobs import CP2, DISTOPT, EP2, SP2, VPP2
from tests.support import ranks

USUAL = ("ctpo", "cppo")
"""Of `make test`."""
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("qwen3-tied", DISTOPT),
    "pp2-vpp2": (
        "qwen3-tied",
        VPP2 | {"layer_spec": "local"},
    ),
    "tp2-sp": ("qwen3-tied", SP2),
    "cp2": ("qwen3-tied", CP2),
    "ep2": ("qwen3-moe-decided", EP2),
}
CTPO = PolicyObjective.preset("ctpo")
ONE_LEARNS = [1.3 * (index == 5) for index in range(16)]


def trajectories(count: int = 16) -> list[Trajectory]:
    """Each longer than half a micro-batch of 60 tokens, so that each is alone in one."""
    rng = random.Random(0)
    result = []
    for index in range(count):
        found = Trajectory(f"p{index // 4}", index % 4, seed=index)
        found.append_context([rng.randrange(models.VOCAB) for _ in range(rng.randint(3, 20))], turn=0)
        ids = [rng.randrange(models.VOCAB) for _ in range(rng.randint(31, 40))]
        found.append_model(ids, [-6.0] * len(ids), [0] * len(ids), 1)
        result.append(found)
    return result


def filled(policy: Trainer, advantages: Sequence[float], *, skip: bool, pack_skipped: bool = False) -> MiniBatch:
    """One optimizer step whose ratios leave 1, by as much as each token says: its log-prob differs with the packing."""
    (mini,) = policy.distribute(trajectories(), advantages, 16, skip_zero_advantage=skip, pack_skipped=pack_skipped)
    policy.compute_old_log_probs([mini])
    if mini.skipped_micro_batches:
        policy._passes.score(mini.skipped_micro_batches, old=True)
    for micro in [*mini.micro_batches, *mini.skipped_micro_batches]:
        if micro.old_log_probs is not None:  # of the last pipeline stage
            micro.old_log_probs = micro.old_log_probs + 0.05 * torch.sin(100.0 * micro.token_ids)
    return mini


def gradient(policy: Trainer, mini: MiniBatch, objective: PolicyObjective) -> torch.Tensor:
    """float32, all parameters in one."""
    _, named = policy.gradients(mini, policy_gradient(objective, "proximal"))
    return torch.cat([value.flatten() for _, value in named])


def update_all(policy: Trainer, mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
    loss = policy_gradient(CTPO, "proximal")
    return summarize_updates([policy.update(mini_batch, loss) for mini_batch in mini_batches])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zero")
    for family in ("qwen3-tied", "qwen3-moe-decided"):
        models.build(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def policy(folder: Path) -> Iterator[Trainer]:
    config = PolicyConfig(micro_batch_tokens=60)
    yield Trainer(config, init_distributed(config, seed=0), folder / "qwen3-tied", temperature=1.0)
    destroy_distributed()


@pytest.mark.parametrize("preset", [pytest.param(p, marks=() if p in USUAL else pytest.mark.slow) for p in PRESETS])
def test_the_gradient_is_that_of_the_whole_step(policy: Trainer, preset: str) -> None:
    """To the bit, where packing is the same: other packing rounds otherwise, with or without them."""
    whole, rest = (filled(policy, models.advantages(), skip=skip) for skip in (False, True))
    assert (len(whole.micro_batches), len(rest.micro_batches)) == (16, 12)
    assert rest.work.trained_tokens < rest.work.tokens == whole.work.trained_tokens
    assert rest.denominators == whole.denominators
    for aggregation in AGGREGATIONS if preset in ("ctpo", "gspo", "cispo") else AGGREGATIONS[:1]:
        objective = PolicyObjective.preset(preset, loss_agg_mode=aggregation)
        found, expected = (gradient(policy, mini, objective) for mini in (rest, whole))
        assert expected.norm() > 0
        assert torch.equal(found, expected), aggregation


def test_a_step_without_any_advantage_is_still_an_optimizer_step(policy: Trainer) -> None:
    policy.use_optimizer(OptimizerConfig(lr=1e-3, schedule="linear", weight_decay=0.0), total_steps=2)
    mini_batches = policy.distribute(trajectories(), [0.0] * 8 + [1.0] * 8, 8, skip_zero_advantage=True)
    policy.compute_old_log_probs(mini_batches)
    metrics = update_all(policy, mini_batches)
    assert metrics["actor/lr"] == pytest.approx(5e-4)
    assert metrics["tokens/trained"] == mini_batches[1].work.trained_tokens < metrics["tokens/total"]
    first, second = (sum(sum(t.loss_mask) for t in part) for part in (trajectories()[:8], trajectories()[8:]))
    assert (metrics["pg_update/loss_tokens"], metrics["pg_update/computed_tokens"]) == (first + second, second)


def test_rates_are_those_of_a_step_that_leaves_nothing_out(policy: Trainer) -> None:
    """A token of advantage 0 is never clipped; the figures of computed tokens are of fewer."""
    found = []
    for skip in (False, True):
        policy.use_optimizer(OptimizerConfig(lr=1e-12), total_steps=1)
        mini = filled(policy, models.advantages(), skip=skip)
        found.append(summarize_updates([policy.update(mini, policy_gradient(CTPO, "proximal"))]))
    whole, rest = found
    assert whole["pg_update/clip/total/count"] > 0
    rates = [name for name in whole if "clip" in name and "computed" not in name]
    assert len(rates) == 10 and [whole[name] for name in rates] == [rest[name] for name in rates]
    assert rest["pg_update/loss_tokens"] == whole["pg_update/loss_tokens"] == whole["pg_update/computed_tokens"]
    for name in ("pg_update/clip/total/rate", "actor/pg_clipfrac"):
        ratio = rest["pg_update/loss_tokens"] / rest["pg_update/computed_tokens"]
        assert rest[f"{name}_computed"] == pytest.approx(rest[name] * ratio)
        assert rest[f"{name}_computed"] > rest[name] > 0


def test_positions_count_what_no_pass_runs_over(policy: Trainer) -> None:
    found = []
    for skip in (False, True):
        mini = filled(policy, models.advantages(), skip=skip)
        policy.gradients(mini, policy_gradient(CTPO, "proximal"))[1].close()
        found.append(gather_positions([mini], CTPO, "proximal", policy.layout))
    whole, rest = found
    assert whole is not None and rest is not None
    for name in ("n", "n_loss", "clip_high", "clip_low"):
        assert np.array_equal(whole.whole.column(name), rest.whole.column(name))
    assert np.array_equal(whole.whole.cells[:2], rest.whole.cells[:2])
    assert not rest.whole.column("n_computed")[2].any()
    rates = [name for name in whole.metrics() if name.endswith("per_trajectory")]
    assert len(rates) == 6 and [whole.metrics()[name] for name in rates] == [rest.metrics()[name] for name in rates]


def test_a_batch_without_any_advantage_reports_no_mean_over_nothing(policy: Trainer) -> None:
    policy.use_optimizer(OptimizerConfig(), total_steps=1)
    mini_batches = policy.distribute(trajectories(), [0.0] * 16, 16, skip_zero_advantage=True)
    assert policy.compute_old_log_probs(mini_batches) == {"mismatch/tokens": 0.0}
    metrics = update_all(policy, mini_batches)
    assert (metrics["actor/grad_norm"], metrics["actor/pg_loss"], metrics["tokens/trained"]) == (0, 0, 0)
    assert all(map(math.isfinite, metrics.values())) and "pg_update/is_ratio/mean" not in metrics
    assert metrics["actor/pg_clipfrac"] == 0 and "actor/pg_clipfrac_computed" not in metrics


def on_every_rank(model: Path, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Of a step in which one trajectory learns, whole and without the rest: gradients, and statistics by position with
    a pass over the rest; the gradient norm of a step in which nothing learns."""
    config = PolicyConfig(micro_batch_tokens=128, timeout_minutes=2.0, **options)
    policy = Trainer(config, init_distributed(config, seed=0), model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(), total_steps=1)
    gradients = [gradient(policy, filled(policy, ONE_LEARNS, skip=skip), CTPO) for skip in (False, True)]
    update = policy.update(filled(policy, [0.0] * 16, skip=True), policy_gradient(CTPO, "proximal"))
    steps = [filled(policy, ONE_LEARNS, skip=skip, pack_skipped=True) for skip in (False, True)]
    for step in steps:
        policy.gradients(step, policy_gradient(CTPO, "proximal"))[1].close()
    positions = [gather_positions([step], CTPO, "proximal", policy.layout) for step in steps]
    cells = [torch.zeros(1) if each is None else torch.from_numpy(each.last.cells) for each in positions]
    destroy_distributed()
    return (*gradients, torch.tensor(update.grad_norm), *cells)


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == "dp2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_rank_that_is_left_without_work_keeps_step_with_the_others(folder: Path, layout: str) -> None:
    family, options = LAYOUTS[layout]
    expected, found, norm, whole, rest = ranks.run(on_every_rank, folder / family, options, ranks=2)[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert float(expected.norm()) > 0 == float(norm)
    assert torch.allclose(rest, whole, rtol=0, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize(
    ("override", "skips"),
    [
        ("objective.preset=cispo", True),
        ("policy.skip_zero_advantage=false", False),
        ("objective.function=mine:loss", False),
        ("objective.entropy_coef=0.01", False),
        ("objective.correction={level: token, normalize: true}", False),
        ("objective.correction={veto: 0.1}", False),
        ("objective.correction={level: sequence}", True),
    ],
)
def test_they_stay_where_something_needs_them(override: str, skips: bool) -> None:
    sections = yaml.safe_load("{run: {name: x, steps: 1}, model: {path: m}, data: {train: [x]}}")
    key, _, value = override.partition("=")
    section, _, name = key.partition(".")
    sections[section] = {name: yaml.safe_load(value)}
    config = Config(**sections)
    assert (config.policy.skip_zero_advantage and not config.objective.needs_zero_advantage) is skips
