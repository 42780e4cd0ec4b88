"""The streaming head gives the loss and the full gradient of the logits head, under every layout."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.config import CorrectionConfig, RejectConfig
from ctpo_megatron.data import PackedBatch
from ctpo_megatron.objective import PolicyObjective
from tests.objective import correction_reference, objective_reference
from tests.policy import head_scenario, models
from tests.policy.jobs import CP2, PP2, SP2, TP2, Jobs, run_job

run = partial(run_job, head_scenario.run)
CORRECTION = {
    "level": "prefix",
    "cap": 1.05,
    "normalize": True,
    "reject": (
        RejectConfig(stat="k1", over="token", high=0.03),
        RejectConfig(stat="k1", over="sequence_sum", low=-0.35),
    ),
    "veto": 0.961,
}
TOKEN_MEAN = {"loss_agg_mode": "token-mean"}  # what is left counts in the denominator
CORRECTED = {"correction": CORRECTION, "objective": TOKEN_MEAN}
ENTROPY = {"objective": {"entropy_coef": 0.5}}
UNTIED = {"family": "qwen3-untied"}
ONE = {
    "tied": {"traced": True},
    "gspo": {"preset": "gspo"},
    "entropy": ENTROPY,
    "corrected": CORRECTED,
    "supervised": {"preset": "supervised"},
    "four-layers": {"family": "four-layers"},
    "bfloat16": {"family": "four-layers", "policy": {"dtype": "bfloat16"}},
}
MORE_OF_ONE = {
    "untied": UNTIED,
    "own": {"own": True},
}
TWO = {
    "tp2": {"policy": TP2, "traced": True},
    "tp2-sp": {"policy": SP2},
    "pp2": {"policy": PP2, "traced": True},
    "dp2": {"traced": True},
    "cp2": {"policy": CP2, "traced": True},
    "cp2-corrected": CORRECTED | {"policy": CP2},
}
MORE = {
    "cp2-gspo": {"preset": "gspo", "policy": CP2},
    "cp2-entropy": ENTROPY | {"policy": CP2},
    "cp2-supervised": {"preset": "supervised", "policy": CP2},
    "cp2-own": {"own": True, "policy": CP2},
    "tp2-corrected": CORRECTED | {"policy": TP2},
    "pp2-corrected": CORRECTED | {"policy": PP2},
}
"""Of `make test-slow`: a rule and a layout that others here have singly; `ctpo verify` has all of both."""


def cases(names: Iterable[str], *but: str) -> list[Any]:
    return [pytest.param(c, marks=pytest.mark.slow if c in MORE | MORE_OF_ONE else ()) for c in names if c not in but]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    for family in ("qwen3-tied", "qwen3-untied"):
        models.build(family, root / family, layers=2)
    models.build("qwen3-tied", root / "four-layers", layers=4)
    return root


@pytest.fixture(scope="module")
def one(folder: Path) -> Jobs:
    return Jobs(partial(run, folder, 1), ONE, MORE_OF_ONE)


@pytest.fixture(scope="module")
def two(folder: Path) -> Jobs:
    return Jobs(partial(run, folder, 2), TWO, MORE)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|found - expected| / |expected| over the whole gradient."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    size = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    assert size > 0
    return (apart / size) ** 0.5


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    for name, value in expected["metrics"].items():
        assert found["metrics"][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert distance(found["gradient"], expected["gradient"]) <= tolerance


@pytest.mark.parametrize("case", cases(ONE | MORE_OF_ONE, "bfloat16"))
def test_one_rank(one: Jobs, case: str) -> None:
    assert_same(one[case]["streaming"], one[case]["logits"])


@pytest.mark.parametrize("case", cases(TWO | MORE))
def test_two_ranks(two: Jobs, case: str) -> None:
    assert_same(two[case]["streaming"], two[case]["logits"])


@pytest.mark.parametrize("case", cases(TWO | MORE))
def test_streaming_does_not_depend_on_the_layout(one: Jobs, two: Jobs, case: str) -> None:
    preset = case.rpartition("-")[2]
    assert_same(two[case]["streaming"], one[preset if preset in ONE | MORE_OF_ONE else "tied"]["streaming"])


@pytest.mark.parametrize("case", ["tp2", "pp2", "dp2", "cp2"])
def test_traces_do_not_depend_on_the_layout(one: Jobs, two: Jobs, case: str) -> None:
    found, expected = two[case]["streaming"]["diagnostics"], one["tied"]["streaming"]["diagnostics"]
    assert found.keys() == expected.keys() and len(found) == 16
    for key, fields in expected.items():
        assert found[key]["advantage"] == fields["advantage"]
        for name in ("log_ratio", "clip_low", "clip_high"):
            assert found[key][name] == pytest.approx(fields[name], abs=1e-5), (key, name)
    assert max(abs(value) for fields in expected.values() for value in fields["log_ratio"]) > 0.1


def test_an_entropy_bonus_changes_the_gradient_alone(one: Jobs) -> None:
    with_bonus, without = one["entropy"]["streaming"], one["tied"]["streaming"]
    assert with_bonus["metrics"] == without["metrics"]
    assert distance(with_bonus["gradient"], without["gradient"]) > 0.01


def test_clips_are_met(one: Jobs) -> None:
    """Without them equality would say little about the loss."""
    metrics = one["tied"]["streaming"]["metrics"]
    assert all(metrics[f"pg_update/clip/{side}/count"] > 0 for side in ("high", "low", "dual"))


def columns_of(
    micro: PackedBatch, log_probs: torch.Tensor
) -> list[tuple[correction_reference.Trajectory, dict[str, Any]]]:
    """What the correction and the loss of every sequence are made of, as lists."""
    named = {"log_probs": log_probs, "anchor": micro.old_log_probs, "advantage": micro.advantages}
    result = []
    for _, place in micro.places():
        model = micro.response_mask[place].int().tolist()
        trainer, sampler = log_probs[place].tolist(), micro.rollout_log_probs[place].tolist()
        trajectory = correction_reference.Trajectory(trainer, sampler, model)
        result.append((trajectory, {name: column[place].tolist() for name, column in named.items()} | {"model": model}))
    return result


def test_corrected_loss_equals_python(one: Jobs) -> None:
    """Weights and masks reach the row that predicts their token, and the denominators count what is left."""
    results = one["corrected"]["streaming"]
    batches = zip(results["mini_batch"].micro_batches, results["log_probs"], strict=True)
    pairs = [pair for micro, log_probs in batches for pair in columns_of(micro, log_probs)]
    expected = correction_reference.reference([trajectory for trajectory, _ in pairs], CorrectionConfig(**CORRECTION))
    sequences = []
    for (_, columns), kept, weights in zip(pairs, expected.kept, expected.weights, strict=True):
        masked = {"loss": iter(kept), "weight": iter(weights)}
        lists = {name: [next(left) if m else 0 for m in columns["model"]] for name, left in masked.items()}
        sequences.append(objective_reference.Sequence(**columns, **lists))
    want = objective_reference.reference(sequences, PolicyObjective.preset("ctpo", **TOKEN_MEAN))
    assert results["metrics"]["actor/pg_loss"] == pytest.approx(want.loss, rel=1e-4)
    masked_fraction = expected.metrics["rollout_rs_masked_fraction"]
    assert results["metrics"]["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(masked_fraction)
    lost = [not any(kept) for kept in expected.kept]
    assert 0 < sum(lost) < len(lost) and any(any(kept) and not all(kept) for kept in expected.kept)


def test_bfloat16_logits_are_the_coarser_ones(one: Jobs) -> None:
    """The streaming head keeps float32 sums of bfloat16 products; megatron's output layer rounds logits to bfloat16."""
    exact = torch.cat(one["four-layers"]["streaming"]["log_probs"])
    errors = {
        head: (torch.cat(one["bfloat16"][head]["log_probs"]) - exact).abs().mean().item()
        for head in ("logits", "streaming")
    }
    assert 0 < errors["streaming"] < errors["logits"]
    assert distance(one["bfloat16"]["streaming"]["gradient"], one["four-layers"]["streaming"]["gradient"]) < 0.1
