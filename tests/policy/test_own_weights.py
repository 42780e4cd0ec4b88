"""Each rank sends what it owns over TCP: together that is the whole model, every tensor once, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.policy import models, own_weights_scenario
from tests.policy.jobs import Results, run_job

TWO: dict[str, dict[str, Any]] = {
    "dp2": {"family": "qwen3-tied"},
    "tp2": {"family": "qwen3-tied", "policy": {"tensor_model_parallel_size": 2}},
    "pp2": {"family": "qwen3-tied", "policy": {"pipeline_model_parallel_size": 2}},
    "ep2": {"family": "qwen3-moe", "policy": {"expert_model_parallel_size": 2}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("own-weights")
    for family in ("qwen3-tied", "qwen3-moe"):
        models.build(family, root / family, layers=2)
    return run_job(own_weights_scenario.main, root, 2, TWO)


@pytest.mark.parametrize("name", list(TWO))
def test_what_arrives_is_the_whole_model(name: str, found: Results) -> None:
    result = found[name]
    whole, tensors = result["whole"], result["tensors"]
    assert tensors.keys() == whole.keys() == result["names"]
    assert all(torch.equal(tensors[key], tensor) for key, tensor in whole.items())
    assert result["sums agree"] and result["size"] == sum(tensor.nbytes for tensor in whole.values())
    sent = [key for of_rank in result["of ranks"] for key in of_rank]
    assert len(sent) == len(whole)


@pytest.mark.parametrize("name", list(TWO))
def test_shapes_are_known_without_the_weights(name: str, found: Results) -> None:
    """Name by name, in the order in which they come: vLLM sizes its buffers by it."""
    whole = found[name]["whole"]
    assert found[name]["declared"] == [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in whole.items()]


def test_who_sends_what(found: Results) -> None:
    for name in ("dp2", "tp2"):
        assert len(found[name]["of ranks"]) == 1
    first, second = found["pp2"]["of ranks"]
    assert all(".layers.1." in key or key == "model.norm.weight" for key in second)
    assert not any(".layers.1." in key for key in first)
    first, second = found["ep2"]["of ranks"]
    assert all(f".experts.{expert}." in key for key, expert in zip(second, [2] * 3 + [3] * 3, strict=False))
    assert len(second) == 2 * 2 * 3 and not any(".experts.2." in key for key in first)
