"""`Trainer.train`: old log-probs come from the first update's own pass where they are the same, and tell the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state as mpu

from ctpo_megatron.config import (
    ObjectiveConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    TrackingConfig,
    advantage_from_config,
    objective_from_config,
)
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Batch, Group
from ctpo_megatron.objective import batch_advantages, window_metrics
from ctpo_megatron.policy import (
    Layout,
    MismatchError,
    Trainer,
    TrainResult,
    apply_correction,
    configured_loss,
    destroy_distributed,
    gather_positions,
    init_distributed,
    summarize_updates,
)
from ctpo_megatron.tracking import Phases
from tests.policy import models
from tests.policy.jobs import CP2, PP2, SP2
from tests.support import ranks

MEASURED = ("time/", "memory/", "tokens/old_log_probs", "weights/version")
OBJECTIVES = {
    "ctpo": ObjectiveConfig(),
    "dppo-tv": ObjectiveConfig(preset="dppo-tv"),
    "behaviour": ObjectiveConfig(anchor="behaviour"),
    "weighted": ObjectiveConfig.model_validate({"anchor": "decoupled", "correction": {"level": "token"}}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": PP2,
    "cp2": CP2,
    "tp2-sp": SP2,
}


def a_batch() -> Batch:
    """16 trajectories in groups of four, all sampled by weights 1; one group has equal rewards."""
    trajectories = models.trajectories()
    for index, trajectory in enumerate(trajectories):
        trajectory.reward = float(index % 4 > 1) if index > 3 else 1.0
        trajectory.tokens["weight_version"] = trajectory.response_mask
    prompts = [Prompt(f"p{index}", "test", (), "", ()) for index in range(4)]
    groups = [Group(prompt, trajectories[4 * index :][:4]) for index, prompt in enumerate(prompts)]
    return Batch(groups, weight_versions=(1,))


class Run:
    """A fresh trainer and one RL step of it; `passes` counts the micro-batches that went forward."""

    def __init__(
        self,
        model: Path,
        layout: Layout,
        objective: ObjectiveConfig,
        size: int,
        *,
        mismatch_limit: float | None = None,
        planned: int | None = None,
        batches: int = 2,
        skip: bool = False,
        repeats: int = 1,
        seed: int = 0,
        replay: bool = False,
        dump_every: int = 1000,
        **config: Any,
    ) -> None:
        optimizer, samples = OptimizerConfig(lr=1e-3, schedule="linear"), size if size % 4 else 4
        prompts = size // samples
        settings = PolicyConfig(
            micro_batch_tokens=256,
            optimizer=optimizer,
            mini_batch_prompts=prompts,
            passes_per_batch=repeats,
            skip_zero_advantage=skip,
            **config,
        )
        self.objective, self.size = objective, size
        self.trainer = Trainer(settings, layout, model, temperature=1.0)
        self.phases = Phases()
        self.trainer.prepare_rl(
            objective,
            RolloutConfig(
                prompts_per_step=(planned // repeats if planned else 16 // size) * prompts,
                samples_per_prompt=samples,
                mismatch_limit=mismatch_limit,
                replay="runs/x" if replay else None,
            ),
            RunConfig(name="test", steps=batches, seed=seed),
            TrackingConfig(dump_every=dump_every),
            self.phases,
        )
        self.passes = 0
        self.trainer._model.gpt[0].register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.passes += 1

    def train(self, batch: Batch | None = None) -> TrainResult:
        return self.trainer.train(batch or a_batch())

    def with_a_pass_of_its_own(self) -> dict[str, float]:
        """The same step by hand."""
        trainer, batch = self.trainer, a_batch()
        advantages = batch_advantages([group.rewards for group in batch.trained], advantage_from_config(self.objective))
        mini_batches = trainer.distribute(batch.trajectories, advantages, self.size, version=1)
        ratio = objective_from_config(self.objective)
        metrics = trainer.compute_old_log_probs(mini_batches)
        metrics |= apply_correction(mini_batches, self.objective.correction, trainer.layout, ratio)
        loss = configured_loss(self.objective)
        metrics |= summarize_updates([trainer.update(mini_batch, loss) for mini_batch in mini_batches])
        positions = gather_positions(mini_batches, ratio, self.objective.anchor, trainer.layout)
        widths = window_metrics([trajectory.model_tokens for trajectory in batch.trajectories], ratio)
        return metrics | (positions.metrics() if positions else {}) | widths

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([tensor.flatten() for _, tensor in self.trainer.weights()])


def compare(model: Path, layout: Layout, name: str, size: int, **config: Any) -> tuple[int, int]:
    """Both ways give the same bits; passes of both."""
    one, other = (Run(model, layout, OBJECTIVES[name], size, **config) for _ in range(2))
    expected, result = one.with_a_pass_of_its_own(), other.train()
    assert torch.equal(one.weights, other.weights)
    assert result.metrics["weights/version"] == other.trainer.version == 2
    known = name != "behaviour" or size == 16  # else they are of the first mini-batch alone
    if known:
        assert comparable(result.metrics) == comparable(expected)
    return one.passes, other.passes


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(MEASURED)}


@pytest.mark.parametrize(
    ("name", "head"), [("ctpo", "streaming"), ("ctpo", "logits"), ("dppo-tv", "streaming"), ("behaviour", "streaming")]
)
def test_one_update_needs_no_second_pass(model: Path, layout: Layout, name: str, head: str) -> None:
    """Three micro-batches."""
    assert compare(model, layout, name, 16, head=head) == (6, 3)


@pytest.mark.parametrize(("name", "saved"), [("ctpo", 2), ("behaviour", 4), ("weighted", 0)])
def test_of_several_updates_the_first_needs_none(model: Path, layout: Layout, name: str, saved: int) -> None:
    """Two optimizer steps of two micro-batches."""
    before, after = compare(model, layout, name, 8)
    assert (before, after) == (8, 8 - saved)


@pytest.mark.parametrize("name", ["ctpo", "behaviour", "weighted"])
def test_what_must_not_be_trained_on_stops_the_step_before_any_weight_changes(
    model: Path, layout: Layout, name: str
) -> None:
    run = Run(model, layout, OBJECTIVES[name], 16, mismatch_limit=1e-3)
    before = run.weights
    with pytest.raises(MismatchError, match=r"more than rollout\.mismatch_limit=0\.001"):
        run.train()
    assert torch.equal(run.weights, before) and run.trainer.version == 1


def test_a_recording_of_another_policy_is_no_mismatch(model: Path, layout: Layout) -> None:
    """Of another policy nothing is said to differ, and all else has the bits of a run that is not stopped."""
    run, unlimited = (
        Run(model, layout, OBJECTIVES["behaviour"], 8, mismatch_limit=limit, replay=limit is not None)
        for limit in (1e-3, None)
    )
    found, expected = run.train().metrics, unlimited.train().metrics
    assert torch.equal(run.weights, unlimited.weights)
    left_out = expected.keys() - found.keys()
    assert {"mismatch/log_prob_abs_max", "mismatch/sigma", "mismatch/tokens"} < left_out
    assert all(name.startswith("mismatch/") for name in left_out)
    assert not any(name.startswith("mismatch/") for name in found) and "rollout_corr/kl" in found
    assert {k: v for k, v in comparable(expected).items() if k not in left_out} == comparable(found)


@pytest.mark.parametrize(("name", "replay"), [("behaviour", False), ("ctpo", True)])
def test_only_against_the_sampler_a_recording_may_be_another_policys(
    model: Path, layout: Layout, name: str, replay: bool
) -> None:
    with pytest.raises(MismatchError):
        Run(model, layout, OBJECTIVES[name], 8, mismatch_limit=1e-3, replay=replay).train()


def test_diagnostics_are_those_of_the_update_itself(model: Path, layout: Layout) -> None:
    """The second optimizer step of a batch has ratios; its trajectories come without another pass."""
    run = Run(model, layout, OBJECTIVES["ctpo"], 8, batches=3)
    result, second = run.train(), run.train()
    assert (result.dumped, second.dumped) == (True, False)  # the first step is dumped whole
    assert run.passes == 2 * 6
    assert sorted(result.diagnostics) == list(range(16)) and sorted(second.diagnostics) == list(range(8, 16))
    ratios = [np.abs(result.diagnostics[place]["log_ratio"]).max() for place in range(16)]
    assert max(ratios[:8]) == 0 and max(ratios[8:]) > 1e-3


def test_the_cumulative_ratio_is_dumped_whatever_the_objective(model: Path, layout: Layout) -> None:
    for fields in Run(model, layout, ObjectiveConfig(preset="grpo"), 8).train().diagnostics.values():
        sums = np.cumsum(fields["log_ratio"]) * (fields["log_ratio"] != 0)
        assert np.allclose(fields["prefix_log_ratio"], sums, atol=1e-5)
    ctpo = Run(model, layout, ObjectiveConfig(), 8).train().diagnostics
    assert all("prefix_log_ratio" not in fields for fields in ctpo.values())


def test_the_steps_that_are_dumped(model: Path, layout: Layout) -> None:
    run = Run(model, layout, OBJECTIVES["ctpo"], 16, batches=5, dump_every=2)
    assert [run.train().dumped for _ in range(5)] == [True, True, False, True, True]


@pytest.mark.parametrize("name", ["ctpo", "behaviour"])
def test_a_dumped_step_knows_the_ratios_of_what_its_updates_skip(model: Path, layout: Layout, name: str) -> None:
    """As if nothing were skipped, for the first and the last of four optimizer steps; the weights do not notice."""
    whole, rest, later = (Run(model, layout, OBJECTIVES[name], 4, batches=3, skip=skip) for skip in (False, True, True))
    later.trainer.version = 2  # is not dumped
    one, two, three = (run.train(without_signal_at_both_ends()) for run in (whole, rest, later))
    assert torch.equal(rest.weights, later.weights)
    assert (whole.weights - rest.weights).abs().max() < 1e-5
    assert one.positions and two.positions and three.positions
    for mini_batch in ("first", "last"):
        expected, found, without = (getattr(each.positions, mini_batch) for each in (one, two, three))
        assert found.unlike(expected, 1e-4) == "" and expected.column("n_computed")[2].any()
        assert not without.column("n_computed")[2].any()
    assert np.array_equal(two.positions.whole.cells, three.positions.whole.cells)
    assert two.positions.metrics() == three.positions.metrics()
    assert sorted(two.diagnostics) == list(range(16)) and sorted(three.diagnostics) == []
    ratios = {place: np.abs(found["log_ratio"]).max() for place, found in two.diagnostics.items()}
    moved = 0 if name == "behaviour" else 8  # the first update has no gradient
    assert all((ratios[place] > 1e-3) == (place >= moved) for place in range(16))


def without_signal_at_both_ends() -> Batch:
    """Rewards are equal within the first and the last group."""
    batch = a_batch()
    for trajectory in batch.groups[3].trajectories:
        trajectory.reward = 0.0
    return batch


def test_a_short_batch_advances_the_schedule_as_a_whole_one(model: Path, layout: Layout) -> None:
    """Two optimizer steps of four planned ones; eight are the run's."""
    run = Run(model, layout, OBJECTIVES["ctpo"], 8, planned=4)
    assert run.train().metrics["actor/lr"] == pytest.approx(1e-3 * 7 / 8)
    assert run.train().metrics["actor/lr"] == pytest.approx(1e-3 * 3 / 8)
    assert {"time/old_log_probs", "time/update", "time/token_diagnostics"} <= run.phases.metrics().keys()


def test_a_dropped_group_is_not_trained_on(model: Path, layout: Layout) -> None:
    without, dropped = a_batch(), a_batch()
    del without.groups[1]
    dropped.groups[1].dropped = True
    one, other = (Run(model, layout, OBJECTIVES["ctpo"], 4, planned=3) for _ in range(2))
    expected, result = one.train(without), other.train(dropped)
    assert torch.equal(one.weights, other.weights)
    assert comparable(result.metrics) == comparable(expected.metrics)
    assert sorted(result.diagnostics) == sorted(expected.diagnostics) == list(range(12))


def test_train_needs_prepare_rl(model: Path, layout: Layout) -> None:
    with pytest.raises(RuntimeError, match="prepare_rl comes before train"):
        Trainer(PolicyConfig(), layout, model, temperature=1.0).train(a_batch())


def on_every_rank(model: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for name, options in LAYOUTS.items():
        found[name] = compare(model, init_distributed(PolicyConfig(**options), seed=0), "ctpo", 16, **options)
        mpu.destroy_model_parallel()
    destroy_distributed()
    return found


@pytest.mark.slow
def test_on_several_ranks_too(model: Path) -> None:
    assert all(after < before for before, after in ranks.run(on_every_rank, model, ranks=2)[0].values())
