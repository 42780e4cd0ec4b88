"""What arrives over TCP is the whole model, bit for bit, whatever the layout of the ranks that send it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.policy import models, sent_weights_scenario
from tests.policy.jobs import EP2, PP2, TP2, VPP2, Jobs, Results, Scenarios, run_job

TWO: Scenarios = {
    "dp2": {"family": "qwen3-tied"},
    "tp2": {"family": "qwen3-tied", "policy": TP2},
    "cp2": {"family": "qwen3-untied", "policy": {"context_parallel_size": 2, "head": "logits"}},
    "pp2": {"family": "qwen3-tied", "policy": PP2},
    "vpp2": {"family": "qwen3-untied", "policy": VPP2},
    "ep2": {"family": "qwen3-moe", "policy": EP2},
}
FOUR: Scenarios = {
    "dp2tp2": {"family": "qwen3-untied", "policy": TP2},
    "dp2tp2ep2": {"family": "qwen3-moe", "policy": TP2 | EP2},
    "tp2pp2": {"family": "qwen3-untied", "policy": TP2 | PP2},
}
ALL = [*TWO, *FOUR]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    root = tmp_path_factory.mktemp("sent-weights")
    for family in ("qwen3-tied", "qwen3-untied", "qwen3-moe"):
        models.build(family, root / family, layers=4)

    def run(root: Path, scenarios: Scenarios) -> Results:
        return run_job(sent_weights_scenario.run, root, 2 if scenarios is TWO else 4, scenarios)

    return Jobs(partial(run, root), TWO, FOUR)


@pytest.mark.parametrize("name", ALL)
def test_what_arrives_is_the_whole_model(name: str, found: Jobs) -> None:
    result = found[name]
    whole, tensors = result["whole"], result["tensors"]
    assert tensors.keys() == whole.keys() and result["sums agree"]
    assert all(torch.equal(tensors[key], tensor) for key, tensor in whole.items())
    assert result["servers"] == (2 if "pp2" in name else 1)


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_known_without_the_weights(name: str, found: Jobs) -> None:
    """Name by name, in the order in which they come: vLLM sizes its buffers by it."""
    whole = found[name]["whole"]
    assert found[name]["declared"] == [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in whole.items()]
