"""`policy.passes_per_batch`: a step is the same optimizer steps by hand, with the old log-probs of the first pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ctpo_megatron.config import (
    PolicyConfig,
    advantage_from_config,
    objective_from_config,
)
from ctpo_megatron.objective import batch_advantages
from ctpo_megatron.policy import (
    Layout,
    MiniBatch,
    apply_correction,
    configured_loss,
    destroy_distributed,
    gather_positions,
    init_distributed,
    summarize_updates,
)
from tests.policy.test_train import OBJECTIVES, Run, a_batch, comparable, without_signal_at_both_ends
from tests.support import ranks

SIZE, COUNT = 4, 4
"""Trajectories of a mini-batch, and mini-batches of a batch."""
OF_THE_FIRST_PASS = ("mismatch/", "rollout_corr/", "tokens/old_log_probs", "actor/entropy")
OF_THE_BATCH = ("tokens/total", "tokens/forward_tflop")
OF_ALL_PASSES = ("tokens/trained", "tokens/trained_forward_tflop", "packing/micro_batches", "pg_update/loss_tokens")


class Passes(Run):
    """`order`: the mini-batches that were trained on, in turn."""

    def __init__(self, model: Path, layout: Layout, name: str = "ctpo", repeats: int = 2, **config: Any) -> None:
        super().__init__(model, layout, OBJECTIVES[name], SIZE, repeats=repeats, **config)
        self.repeats = repeats
        self._seen: list[bytes] = []
        self.trainer._model.gpt[0].register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: object, args: object, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._seen.append(kwargs["input_ids"].numpy().tobytes())

    @property
    def order(self) -> list[int]:
        of = {
            micro.token_ids.numpy().tobytes(): number
            for number, mini_batch in enumerate(self.mini_batches())
            for micro in mini_batch.micro_batches
        }
        assert len(of) == COUNT  # of one micro-batch each
        return [of[ids] for ids in self._seen]

    def mini_batches(self) -> list[MiniBatch]:
        batch = a_batch()
        advantages = batch_advantages([group.rewards for group in batch.trained], advantage_from_config(self.objective))
        return self.trainer.distribute(batch.trajectories, advantages, SIZE, version=1)

    def by_hand(self, order: list[int]) -> tuple[dict[str, float], np.ndarray[Any, Any]]:
        """An optimizer step on each of these mini-batches: metrics, and the cells of the positions of all of them."""
        trainer, mini_batches = self.trainer, self.mini_batches()
        loss, ratio = configured_loss(self.objective), objective_from_config(self.objective)
        metrics = trainer.compute_old_log_probs(mini_batches)
        metrics |= apply_correction(mini_batches, self.objective.correction, trainer.layout, ratio)
        updates, cells = [], []
        for number in order:
            updates.append(trainer.update(mini_batches[number], loss))
            found = gather_positions([mini_batches[number]], ratio, self.objective.anchor, trainer.layout)
            cells += [found.whole.cells] if found else []
        return metrics | summarize_updates(updates, self.repeats), np.sum(cells, axis=0)


def compare(model: Path, layout: Layout, name: str, **config: Any) -> list[int]:
    """A step of two passes is that by hand bit for bit; its order."""
    one, other = (Passes(model, layout, name, **config) for _ in range(2))
    result = one.train()
    metrics, cells = other.by_hand(order := one.order)
    assert torch.equal(one.weights, other.weights)
    # With the sampler as anchor, no more old log-probs are computed than those of the first update.
    left_out = OF_THE_FIRST_PASS if name == "behaviour" else ("tokens/old_log_probs",)
    expected = {key: value for key, value in comparable(metrics).items() if not key.startswith(left_out)}
    assert {key: result.metrics[key] for key in expected} == expected
    if result.positions and name != "behaviour":  # as entropies
        np.testing.assert_allclose(result.positions.whole.cells, cells, rtol=1e-12)
    return order


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_passes_are_those_by_hand(model: Path, layout: Layout, name: str) -> None:
    order = compare(model, layout, name)
    assert order[:COUNT] == sorted(order[COUNT:]) == [*range(COUNT)]


def test_each_pass_has_another_order(model: Path, layout: Layout) -> None:
    """By seed, step and number of the pass; the batch's last step is on its last mini-batch."""

    def orders(seed: int, step: int) -> list[list[int]]:
        run = Passes(model, layout, repeats=4, seed=seed)
        run.trainer.version = step
        run.train()
        return [run.order[start : start + COUNT] for start in range(0, 4 * COUNT, COUNT)]

    found = orders(3, 1)
    assert found == orders(3, 1) and found[0] == [*range(COUNT)] and found[-1][-1] == COUNT - 1
    assert all(sorted(order) == [*range(COUNT)] for order in found)
    assert len({tuple(order) for order in found}) == 4
    assert orders(3, 2) != found != orders(2, 1)


def test_what_counts_passes_and_what_does_not(model: Path, layout: Layout) -> None:
    one, two = (Passes(model, layout, repeats=repeats).train().metrics for repeats in (1, 2))
    once = {name: value for name, value in one.items() if name.startswith(OF_THE_FIRST_PASS) or name in OF_THE_BATCH}
    assert {"mismatch/tokens", "tokens/old_log_probs_tflop", *OF_THE_BATCH} < once.keys()
    assert {name: two[name] for name in once} == once
    assert all(two[name] == pytest.approx(2 * one[name]) for name in OF_ALL_PASSES)
    assert two["weights/version"] == one["weights/version"] == 2


def test_the_schedule_counts_optimizer_steps_of_all_passes(model: Path, layout: Layout) -> None:
    """Of two batches: 16 of two passes, also where a batch has half of its mini-batches."""
    assert Passes(model, layout).train().metrics["actor/lr"] == pytest.approx(1e-3 * 9 / 16)
    run, short = Passes(model, layout, planned=8), a_batch()
    del short.groups[2:]
    assert run.train(short).metrics["actor/lr"] == pytest.approx(1e-3 * 13 / 16)
    assert run.train().metrics["actor/lr"] == pytest.approx(1e-3 * 1 / 16)


@pytest.mark.parametrize("name", ["ctpo", "behaviour"])
def test_ratios_are_those_of_the_last_pass(model: Path, layout: Layout, name: str) -> None:
    """Also of what its updates skip, in a step that is dumped; the weights do not notice."""
    whole, rest, later = (Passes(model, layout, name, batches=3, skip=skip) for skip in (False, True, True))
    later.trainer.version = 2  # is not dumped
    one, two = (run.train(without_signal_at_both_ends()) for run in (whole, rest))
    assert one.positions and two.positions
    for mini_batch in ("first", "last"):
        expected, found = (getattr(each.positions, mini_batch) for each in (one, two))
        assert found.unlike(expected, 1e-4) == "" and expected.column("n_computed")[2].any()
    assert sorted(two.diagnostics) == [*range(16)]
    if name == "ctpo":
        assert all(np.abs(found["log_ratio"]).max() > 1e-3 for found in two.diagnostics.values())
    assert sorted(later.train(a_batch()).diagnostics) == [*range(12, 16)]


def on_two_replicas(model: Path) -> dict[str, list[int]]:
    layout = init_distributed(PolicyConfig(), seed=0)
    assert layout.dp_size == 2
    found = {name: compare(model, layout, name) for name in ("ctpo", "weighted")}
    destroy_distributed()
    return found


def test_on_two_replicas_too(model: Path, layout: Layout) -> None:
    """In the order of one."""
    order = compare(model, layout, "ctpo")
    assert ranks.run(on_two_replicas, model, ranks=2) == [{"ctpo": order, "weighted": order}] * 2
