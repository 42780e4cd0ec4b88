"""Old log-probs come from the first update's own pass where they are the same, and tell the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import ObjectiveConfig, OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    BatchStart,
    Layout,
    Trainer,
    apply_correction,
    configured_loss,
    destroy_distributed,
    init_distributed,
)
from tests.policy import models
from tests.support import ranks

MEASURED = ("time/", "memory/", "tokens/old_log_probs")
OBJECTIVES = {
    "ctpo": ObjectiveConfig(),
    "cispo": ObjectiveConfig(preset="cispo"),
    "behaviour": ObjectiveConfig(anchor="behaviour"),
    "weighted": ObjectiveConfig.model_validate({"anchor": "decoupled", "correction": {"level": "token"}}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("start")
    models.build("qwen3-tied", directory, layers=2)
    return directory


@pytest.fixture
def layout() -> Iterator[Layout]:
    yield init_distributed(PolicyConfig(), seed=0)
    destroy_distributed()


class Run:
    """A fresh policy and a step of it: metrics, weights, tokens of a micro-batch that went forward."""

    def __init__(self, model: Path, layout: Layout, objective: ObjectiveConfig, size: int, **config: Any) -> None:
        settings = PolicyConfig(micro_batch_tokens=256, **config)
        self.objective, self.layout, self.size = objective, layout, size
        self.policy = Trainer(settings, layout, model, temperature=1.0)
        self.policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
        self.mini_batches = self.policy.mini_batches(models.trajectories(), models.advantages(), size)
        self.passes = 0
        self.policy._model.gpt[0].register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def with_a_pass_of_its_own(self) -> dict[str, float]:
        found = self.policy.compute_old_log_probs(self.mini_batches)
        found |= apply_correction(self.mini_batches, self.objective, self.layout, True)
        return found | self._update(None)

    def begun(self, **options: Any) -> dict[str, float]:
        start = BatchStart(self.objective, self.layout, True, **options)
        return self.policy.begin(self.mini_batches, start) | self._update(start)

    def _update(self, start: BatchStart | None) -> dict[str, float]:
        loss = configured_loss(self.objective)
        return self.policy.update_all(self.mini_batches, loss, planned=len(self.mini_batches), start=start)

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.policy.weights()])


def compare(model: Path, layout: Layout, name: str, size: int, **config: Any) -> tuple[int, int]:
    """Both ways give the same bits; passes of both."""
    one, other = (Run(model, layout, OBJECTIVES[name], size, **config) for _ in range(2))
    expected, found = one.with_a_pass_of_its_own(), other.begun()
    assert torch.equal(one.weights, other.weights)
    known = name != "behaviour" or len(one.mini_batches) == 1  # else they are of the first mini-batch alone
    if known:
        assert comparable(found) == comparable(expected)
    return one.passes, other.passes


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


@pytest.mark.parametrize(
    ("name", "head"), [("ctpo", "streaming"), ("ctpo", "logits"), ("cispo", "streaming"), ("behaviour", "streaming")]
)
def test_one_update_needs_no_second_pass(model: Path, layout: Layout, name: str, head: str) -> None:
    """Three micro-batches."""
    assert compare(model, layout, name, 16, head=head) == (6, 3)


@pytest.mark.parametrize(("name", "saved"), [("ctpo", 2), ("behaviour", 4), ("weighted", 0)])
def test_of_several_updates_the_first_needs_none(model: Path, layout: Layout, name: str, saved: int) -> None:
    """Two optimizer steps of two micro-batches."""
    before, after = compare(model, layout, name, 8)
    assert (before, after) == (8, 8 - saved)


def test_what_must_not_be_trained_on_stops_the_step_before_any_weight_changes(model: Path, layout: Layout) -> None:
    def refuse(metrics: Mapping[str, float]) -> None:
        raise RuntimeError(f"differs by {metrics['mismatch/log_prob_abs_max']:.3f}")

    run = Run(model, layout, OBJECTIVES["ctpo"], 16)
    before = run.weights
    with pytest.raises(RuntimeError, match="differs by "):
        run.begun(check=refuse)
    assert torch.equal(run.weights, before)


def test_diagnostics_are_those_of_the_update_itself(model: Path, layout: Layout) -> None:
    """The second optimizer step of a batch has ratios; its trajectories come without another pass."""
    run = Run(model, layout, OBJECTIVES["ctpo"], 8)
    run.begun()
    passes = run.passes
    found = run.policy.token_diagnostics(run.mini_batches[-1], PolicyObjective.preset("ctpo"))
    assert run.passes == passes and sorted(found) == list(range(8, 16))
    assert max(abs(x) for fields in found.values() for x in fields["log_ratio"]) > 1e-3


def on_every_rank(model: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name, options in LAYOUTS.items():
        found[name] = compare(model, init_distributed(PolicyConfig(**options), seed=0), "ctpo", 16, **options)
        mpu.destroy_model_parallel()
    destroy_distributed()
    return found


def test_on_several_ranks_too(model: Path) -> None:
    assert all(after < before for before, after in ranks.run(on_every_rank, model, ranks=2)[0].values())
