"""Trajectories without a verdict take no part in a step: it is that of a batch without them, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import ObjectiveConfig, PolicyConfig
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.data.trajectory import Batch
from ctpo_megatron.policy import Layout, destroy_distributed, init_distributed
from tests.policy.jobs import CP2, DISTOPT, PP2, SP2
from tests.policy.test_train import Run, a_batch, comparable
from tests.support import ranks

FAILED = NoVerdict("exception", "the scorer failed")
MISSING = (2, 5, 11)
"""Of 16 in groups of four: a fifth; every group still has two verdicts."""
OBJECTIVES: dict[str, dict[str, Any]] = {
    "seq-mean-token-mean": {},
    "token-mean": {"loss_agg_mode": "token-mean"},
    "seq-mean-token-sum": {"loss_agg_mode": "seq-mean-token-sum"},
    "without masked sequences": {"count_masked_sequences": False},
    "mean_baseline": {"advantage": {"kind": "mean_baseline"}},
    "rloo": {"advantage": {"kind": "rloo"}},
    "dppo-tv": {"preset": "dppo-tv"},
    "behaviour": {"anchor": "behaviour"},
    "corrected": {
        "anchor": "decoupled",
        "correction": {"level": "token", "normalize": True, "reject": [{"stat": "k2", "over": "token", "high": 0.05}]},
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": DISTOPT,
    "pp2": PP2,
    "cp2": CP2,
    "tp2-sp": SP2,
}


def failing(missing: Sequence[int] = MISSING) -> Batch:
    """As `a_batch`; nobody judged these."""
    batch = a_batch()
    for place in missing:
        batch.trajectories[place].reward, batch.trajectories[place].no_verdict = None, FAILED
    return batch


def without(missing: Sequence[int] = MISSING) -> Batch:
    """The others alone."""
    batch = a_batch()
    names = [(t.prompt_id, t.sample_index) for place, t in enumerate(batch.trajectories) if place in missing]
    for group in batch.groups:
        group.trajectories = [t for t in group.trajectories if (t.prompt_id, t.sample_index) not in names]
    batch.groups = [group for group in batch.groups if group.trajectories]
    return batch


def both(
    model: Path,
    layout: Layout,
    objective: ObjectiveConfig,
    missing: Sequence[int] = MISSING,
    gone: Sequence[int] | None = None,
    **config: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after a step of the others alone, and of the whole batch; their metrics are equal, too.

    gone: what takes no part, where that is more than what is `missing`.
    """
    one, other = (Run(model, layout, objective, 16, planned=1, **config) for _ in range(2))
    expected = one.train(without(missing if gone is None else gone) if layout.is_rank_zero else empty())
    found = other.train(failing(missing) if layout.is_rank_zero else empty())
    assert of_the_loss(found.metrics) == of_the_loss(expected.metrics)
    return one.weights, other.weights


def of_the_loss(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without the sizes of what was sampled."""
    return {n: v for n, v in comparable(metrics).items() if n not in ("tokens/total", "tokens/forward_tflop")}


def empty() -> Batch:
    """What ranks other than zero have of a batch."""
    return Batch([], weight_versions=(1,))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_is_that_of_the_others(model: Path, layout: Layout, name: str) -> None:
    objective = ObjectiveConfig.model_validate(OBJECTIVES[name])
    expected, found = both(model, layout, objective)
    assert torch.equal(found, expected)
    assert not torch.equal(found, Run(model, layout, objective, 16).weights)


def test_a_lone_verdict_is_compared_with_nothing(model: Path, layout: Layout) -> None:
    """It has no advantage, and is not counted; with a baseline over the whole batch it has one."""
    lone = (0, 1, 2, 5, 11)
    expected, found = both(model, layout, ObjectiveConfig(), lone, gone=(0, 1, 2, 3, 5, 11))
    assert torch.equal(found, expected)
    objective = ObjectiveConfig.model_validate(OBJECTIVES["mean_baseline"])
    expected, found = both(model, layout, objective, lone)
    assert torch.equal(found, expected)


def test_optimizer_steps_keep_their_groups(model: Path, layout: Layout) -> None:
    """Two of two groups each, whatever is missing from the first."""
    run = Run(model, layout, ObjectiveConfig(), 8)
    result = run.train(failing((0, 1, 2, 11)))
    assert sorted(result.diagnostics) == [4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15]  # a step that is dumped whole
    assert result.metrics["actor/lr"] == pytest.approx(1e-3 * 3 / 4)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("size", [8, 16])
def test_a_batch_that_nobody_judged_is_a_step_without_a_gradient(
    model: Path, layout: Layout, name: str, size: int
) -> None:
    run = Run(model, layout, ObjectiveConfig.model_validate(OBJECTIVES[name]), size)
    metrics = run.train(failing(range(16))).metrics
    assert (metrics["actor/grad_norm"], metrics["tokens/trained"]) == (0, 0)
    assert all(value == value for value in metrics.values())


def on_every_rank(model: Path) -> dict[str, list[bool]]:
    found = {}
    for name, options in LAYOUTS.items():
        layout = init_distributed(PolicyConfig(timeout_minutes=2.0, **options), seed=0)
        runs = [(MISSING, None), ((0, 1, 2, 5, 11), (0, 1, 2, 3, 5, 11))]
        pairs = [both(model, layout, ObjectiveConfig(), *places, **options) for places in runs]
        found[name] = [torch.equal(*pair) for pair in pairs]
        nothing = Run(model, layout, ObjectiveConfig(), 16, **options)
        metrics = nothing.train(failing(range(16)) if layout.is_rank_zero else empty()).metrics
        found[name].append(metrics["actor/grad_norm"] == 0)
        mpu.destroy_model_parallel()
    destroy_distributed()
    return found


@pytest.mark.slow
def test_all_ranks_leave_out_the_same(model: Path) -> None:
    for found in ranks.run(on_every_rank, model, ranks=2):
        assert found == {name: [True, True, True] for name in LAYOUTS}
