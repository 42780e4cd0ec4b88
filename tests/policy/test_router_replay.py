"""Experts that an engine recorded: the trainer takes them, and says how often its own router would have.

`ctpo verify` compares log-probs and gradients with an oracle that takes recorded experts, in every kind of layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ctpo_megatron.config import ObjectiveConfig, PolicyConfig
from ctpo_megatron.data import DataError, Trajectory
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.policy import Layout, MiniBatch, Trainer
from ctpo_megatron.policy.router_replay import Choices, ReplayedRouter
from tests.policy import models
from tests.policy.test_train import Run, a_batch
from tests.support.experts import taken

AGREEMENT, UNRECORDED = "mismatch/router_agreement", "mismatch/router_unrecorded"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Of one layer, whose router sees the same whatever the experts are."""
    folder = tmp_path_factory.mktemp("experts")
    return folder, models.build("qwen3-moe", folder, layers=1)


def record(found: list[Trajectory], model: PreTrainedModel) -> list[Trajectory]:
    """Their experts, as an engine with this model reports them."""
    for trajectory in found:
        trajectory.fill(0, {ROUTER_CHOICES: taken(model, trajectory.token_ids.copy()).astype(np.uint8)})
    return found


def scored(folder: Path, layout: Layout, found: list[Trajectory], **policy: Any) -> tuple[MiniBatch, dict[str, float]]:
    trainer = Trainer(PolicyConfig(micro_batch_tokens=256, **policy), layout, folder, temperature=1.0)
    (mini_batch,) = trainer.distribute(found, [1.0] * len(found), size=len(found))
    return mini_batch, trainer.compute_old_log_probs([mini_batch])


def log_probs(mini_batch: MiniBatch) -> torch.Tensor:
    found: list[torch.Tensor] = []
    for micro in mini_batch.micro_batches:
        assert micro.old_log_probs is not None
        found.append(micro.old_log_probs)
    return torch.cat(found)


def test_its_own_choices_change_nothing(model: tuple[Path, PreTrainedModel], layout: Layout) -> None:
    folder, of_transformers = model
    live, metrics = scored(folder, layout, models.trajectories())
    assert metrics[UNRECORDED] == 1.0 and AGREEMENT not in metrics
    replayed, metrics = scored(folder, layout, record(models.trajectories(), of_transformers), router_replay=True)
    assert (metrics[AGREEMENT], metrics[UNRECORDED]) == (1.0, 0.0)
    torch.testing.assert_close(log_probs(replayed), log_probs(live), atol=2e-6, rtol=0)


def test_other_choices_are_taken_and_counted(
    model: tuple[Path, PreTrainedModel], layout: Layout, tmp_path: Path
) -> None:
    folder, of_transformers = model
    other = models.build("qwen3-moe", tmp_path / "other", layers=1)
    with torch.no_grad():
        gate = other.model.layers[0].mlp.gate.weight
        gate.add_(0.3 * gate.std() * torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)))
    found = record(models.trajectories(), other)
    read = [trajectory.token_ids.copy() for trajectory in found]
    share = np.concatenate([(taken(of_transformers, ids) == taken(other, ids)).all(axis=2) for ids in read]).mean()
    assert 0.5 < share < 0.95
    _, metrics = scored(folder, layout, found, router_replay=True)
    assert metrics[AGREEMENT] == pytest.approx(share, abs=1e-12) and metrics[UNRECORDED] == 0
    # Rows that were not recorded, as after the resume of an older run, are routed live.
    lost = record(models.trajectories(), other)
    for trajectory in lost[::2]:
        trajectory.tokens[ROUTER_CHOICES][2:5] = 0
    counted = sum(np.flatnonzero(trajectory.response_mask).max() for trajectory in lost)
    _, metrics = scored(folder, layout, lost, router_replay=True)
    assert metrics[UNRECORDED] == pytest.approx(3 * len(lost[::2]) / counted, abs=1e-12)
    for trajectory in lost:
        trajectory.tokens[ROUTER_CHOICES][:] = 0
    unrecorded, metrics = scored(folder, layout, lost, router_replay=True)
    assert metrics == pytest.approx(metrics | {UNRECORDED: 1.0}) and AGREEMENT not in metrics
    without, metrics = scored(folder, layout, models.trajectories(), router_replay=True)
    assert metrics[UNRECORDED] == 1.0 and AGREEMENT not in metrics
    live, _ = scored(folder, layout, models.trajectories())
    assert torch.equal(log_probs(unrecorded), log_probs(live)) and torch.equal(log_probs(without), log_probs(live))


def test_a_second_pass_over_a_batch_takes_them_and_compares_nothing(
    model: tuple[Path, PreTrainedModel], layout: Layout
) -> None:
    """Its log-probs are not the old ones."""
    folder, of_transformers = model
    found = []
    for repeats in (1, 2):
        batch = a_batch()
        record(batch.trajectories, of_transformers)
        run = Run(folder, layout, ObjectiveConfig(), 8, repeats=repeats, router_replay=True)
        metrics = run.train(batch).metrics
        found.append({name: value for name, value in metrics.items() if name.startswith("mismatch/")})
        assert metrics[AGREEMENT] > 0.99 and run.trainer._passes.router_metrics() == {}  # nothing left to the next step
    assert found[0] == found[1]


def test_choices_of_another_model_are_refused(model: tuple[Path, PreTrainedModel], layout: Layout) -> None:
    folder, of_transformers = model
    found = record(models.trajectories(), of_transformers)
    found[3].tokens[ROUTER_CHOICES][1] = 4
    with pytest.raises(DataError, match=r"trajectory p0#3 has router choices .* up to expert 4, but the mo"):
        scored(folder, layout, found, router_replay=True)
    for trajectory in (deep := models.trajectories()):
        trajectory.fill(0, {ROUTER_CHOICES: np.zeros((len(trajectory), 2, 2), np.uint8)})
    with pytest.raises(DataError, match="of 2 layers x 2"):
        scored(folder, layout, deep, router_replay=True)


def test_a_dense_model_has_no_replay(tmp_path: Path, layout: Layout) -> None:
    models.build("qwen3-tied", tmp_path, layers=1)
    trainer = Trainer(PolicyConfig(), layout, tmp_path, temperature=1.0)
    assert trainer._model.replays is None
    _, metrics = scored(tmp_path, layout, models.trajectories())
    assert not {AGREEMENT, UNRECORDED} & set(metrics)


def routed(router: ReplayedRouter, scores: torch.Tensor) -> list[list[int]]:
    values, experts = router.get_replay_topk(scores, 2, default_compute_topk=lambda s, k, **_: torch.topk(s, k, dim=1))
    assert torch.equal(values, scores.gather(1, experts))
    return experts.tolist()


def choices(*experts: list[int]) -> Choices:
    """For one layer; [0, 0] is no record."""
    made = torch.tensor(experts, dtype=torch.uint8)[:, None]
    return Choices(made, made[:, 0, 0] != made[:, 0, 1], compared=0)


def test_layers_that_are_computed_again_get_the_choices_of_their_own_micro_batch() -> None:
    router, scores = ReplayedRouter(0, recomputed=True), torch.tensor([[3.0, 2.0, 1.0]])
    router.training = True
    for experts in ([0, 1], [2, 1], [0, 0]):
        router.choices = choices(experts)
        with torch.no_grad():
            assert routed(router, scores) == [experts if experts[1] else [0, 1]]
    assert [routed(router, scores) for _ in range(2)] == [[[0, 1]], [[2, 1]]]
    assert router.reset() == 1
    router.training, router.choices = True, choices([2, 1])
    with pytest.raises(RuntimeError, match="computed again more often than once"):
        routed(router, scores)
    router.training = False  # a pass without gradients is none that is computed again
    assert routed(router, scores) == [[2, 1]] and router.reset() == 0


def test_choices_of_other_rows_are_refused() -> None:
    router = ReplayedRouter(0, recomputed=False)
    router.choices = choices([0, 1], [1, 2])
    with pytest.raises(RuntimeError, match="layer 0 routes 1 rows, and choices are of 2"):
        routed(router, torch.zeros(1, 3))
