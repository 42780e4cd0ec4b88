"""The streaming head gives the loss and the full gradient of the logits head, under every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.policy import head_scenario, models
from tests.policy.jobs import Results, run_job

run = partial(run_job, head_scenario.main)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
UNTIED = {"family": "qwen3-untied"}
ONE = {
    "tied": {},
    "untied": UNTIED,
    "gspo": {"preset": "gspo"},
    "dapo": {"preset": "dapo"},
    "cispo": {"preset": "cispo"},
    "supervised": {"preset": "supervised"},
    "bfloat16": {"policy": {"dtype": "bfloat16"}},
}
TWO = {
    "tp2": {"policy": TP2},
    "tp2-sp": {"policy": TP2 | {"sequence_parallel": True}},
    "tp2-sp-gspo": UNTIED | {"preset": "gspo", "policy": TP2 | {"sequence_parallel": True}},
    "pp2": {"policy": PP2},
    "pp2-untied": UNTIED | {"policy": PP2},
    "dp2": {},
    "cp2": {"policy": CP2},
    "cp2-gspo": {"preset": "gspo", "policy": CP2},
    "cp2-dapo": {"preset": "dapo", "policy": CP2},
    "cp2-cispo": {"preset": "cispo", "policy": CP2},
    "cp2-supervised": {"preset": "supervised", "policy": CP2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("heads")
    for family in ("qwen3-tied", "qwen3-untied"):
        models.build(family, root / family)
    return root


@pytest.fixture(scope="module")
def one(folder: Path) -> Results:
    return run(folder, 1, ONE)


@pytest.fixture(scope="module")
def two(folder: Path) -> Results:
    return run(folder, 2, TWO)


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


@pytest.mark.parametrize("case", [case for case in ONE if case != "bfloat16"])
def test_one_rank(one: Results, case: str) -> None:
    assert_same(one[case]["streaming"], one[case]["logits"])


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(two: Results, case: str) -> None:
    assert_same(two[case]["streaming"], two[case]["logits"])


@pytest.mark.parametrize(
    "case", ["tp2", "tp2-sp", "pp2", "dp2", "cp2", "cp2-gspo", "cp2-dapo", "cp2-cispo", "cp2-supervised"]
)
def test_streaming_does_not_depend_on_the_layout(one: Results, two: Results, case: str) -> None:
    preset = case.rpartition("-")[2]
    assert_same(two[case]["streaming"], one[preset if preset in ONE else "tied"]["streaming"])


@pytest.mark.parametrize("case", ["tp2", "pp2", "dp2", "cp2"])
def test_traces_do_not_depend_on_the_layout(one: Results, two: Results, case: str) -> None:
    found, expected = two[case]["streaming"]["diagnostics"], one["tied"]["streaming"]["diagnostics"]
    assert found.keys() == expected.keys() and len(found) == 16
    for key, fields in expected.items():
        assert found[key]["advantage"] == fields["advantage"]
        for name in ("log_ratio", "clip_low", "clip_high"):
            assert found[key][name] == pytest.approx(fields[name], abs=1e-5), (key, name)
    assert max(abs(value) for fields in expected.values() for value in fields["log_ratio"]) > 0.1


def test_clips_are_met(one: Results) -> None:
    """Without them equality would say little about the loss."""
    metrics = one["tied"]["streaming"]["metrics"]
    assert all(metrics[f"pg_update/clip/{side}/count"] > 0 for side in ("high", "low", "dual"))


def test_bfloat16_logits_are_the_coarser_ones(one: Results) -> None:
    """The streaming head keeps float32 sums of bfloat16 products; megatron's output layer rounds logits to bfloat16."""
    exact = torch.cat(one["tied"]["streaming"]["log_probs"])
    errors = {
        head: (torch.cat(one["bfloat16"][head]["log_probs"]) - exact).abs().mean().item()
        for head in ("logits", "streaming")
    }
    assert 0 < errors["streaming"] < errors["logits"]
    assert distance(one["bfloat16"]["streaming"]["gradient"], one["tied"]["streaming"]["gradient"]) < 0.1
