"""Each rank sends its part over TCP: together that is the whole model, every row once, equally much of each rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.policy.hf_share import Rows, cut
from tests.cluster.nodes import Cable, missing
from tests.policy import models, own_weights_scenario
from tests.policy.jobs import EP2, PP2, TP2, Jobs, Results, Scenarios, run_job

TWO: Scenarios = {
    "dp2": {"family": "qwen3-tied"},
    "tp2": {"family": "qwen3-tied", "policy": TP2},
    "cp2": {"family": "qwen3-untied", "policy": {"context_parallel_size": 2, "head": "logits"}},
    "pp2": {"family": "qwen3-tied", "policy": PP2},
    "ep2": {"family": "qwen3-moe", "policy": EP2},
}
FOUR: Scenarios = {
    "dp2tp2": {"family": "qwen3-untied", "policy": TP2},
    "dp2tp2ep2": {"family": "qwen3-moe", "policy": TP2 | EP2},
}
ALL = [*TWO, *FOUR]


def built(root: Path) -> Path:
    for family in ("qwen3-tied", "qwen3-untied", "qwen3-moe"):
        models.build(family, root / family, layers=2)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("own-weights"))


@pytest.fixture(scope="module")
def found(root: Path) -> Jobs:
    def run(scenarios: Scenarios) -> Results:
        return run_job(own_weights_scenario.run, root, 2 if scenarios is TWO else 4, scenarios)

    return Jobs(run, TWO, FOUR)


@pytest.mark.parametrize("name", ALL)
def test_what_arrives_is_the_whole_model(name: str, found: Jobs) -> None:
    result = found[name]
    whole, tensors = result["whole"], result["tensors"]
    assert tensors.keys() == whole.keys() == result["names"]
    assert all(torch.equal(tensors[key], tensor) for key, tensor in whole.items())
    assert result["sums agree"] and result["size"] == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("name", ALL)
def test_shapes_are_known_without_the_weights(name: str, found: Jobs) -> None:
    """Name by name, in the order in which they come: vLLM sizes its buffers by it."""
    whole = found[name]["whole"]
    assert found[name]["declared"] == [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in whole.items()]


@pytest.mark.parametrize("name", [name for name in ALL if name != "pp2"])
def test_all_ranks_that_have_a_tensor_send_equally_much(name: str, found: Jobs) -> None:
    """Of experts, and of everything else."""
    for experts in {False, name in ("ep2", "dp2tp2ep2")}:
        sizes = [
            sum(size for entry, *_, size in entries if (".experts." in entry) == experts)
            for entries in found[name]["of ranks"]
        ]
        assert len(sizes) == (4 if name in FOUR else 2) and max(sizes) <= 1.1 * min(sizes), sizes


def test_a_stage_and_an_expert_parallel_rank_send_their_own(found: Jobs) -> None:
    first, second = ([entry[0] for entry in entries] for entries in found["pp2"]["of ranks"])
    assert all(".layers.1." in key or key == "model.norm.weight" for key in second)
    assert not any(".layers.1." in key for key in first)
    for name in ("ep2", "dp2tp2ep2"):
        for entries in found[name]["of ranks"]:
            experts = {int(entry[0].split(".experts.")[1][0]) // 2 for entry in entries if ".experts." in entry[0]}
            assert len(experts) == 1


@pytest.fixture
def cables() -> Iterator[list[Cable]]:
    cables = list[Cable]()
    try:
        for _ in range(4):
            cables.append(Cable())
            cables[-1].reach_all()
        yield cables
    finally:
        for cable in cables:
            cable.remove()


@pytest.mark.cluster
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_engines_of_four_nodes_fetch_equally_much_from_each_rank(root: Path, cables: list[Cable]) -> None:
    settings: dict[str, Any] = {
        "address": cables[0].there,
        "namespaces": [cable.namespace for cable in cables],
        **FOUR["dp2tp2"],
    }
    result = run_job(own_weights_scenario.run, root, 4, {"four": settings})["four"]
    assert all(torch.equal(result["tensors"][key], tensor) for key, tensor in result["whole"].items())
    assert result["sums agree"]
    sent = result["sent"]
    print(f"bytes that each of four ranks sent to four engines: {sent}")
    assert len(sent) == 4 and max(sent) <= 1.1 * min(sent)
    assert (
        4 * result["size"] <= sum(sent) <= 4.1 * result["size"]
    )  # each engine everything, with little between tensors


ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40), st.integers(1, 64)), max_size=20)


@given(ROWS, st.integers(1, 9))
def test_replicas_cut_a_shard_into_equal_stretches(tensors: list[tuple[int, int, int]], replicas: int) -> None:
    """Of tensors with a first row, a number of rows and the bytes of a row."""
    shard, row_bytes = [Rows(first, first + count) for first, count, _ in tensors], [each for *_, each in tensors]
    of_replicas = [cut(shard, row_bytes, number, replicas) for number in range(replicas)]
    for rows, pieces in zip(shard, zip(*of_replicas, strict=True), strict=True):
        assert [row for piece in pieces for row in range(*piece)] == list(range(*rows))
    sizes = [
        sum((rows.end - rows.first) * each for rows, each in zip(of, row_bytes, strict=True)) for of in of_replicas
    ]
    assert max(sizes) - min(sizes) <= 2 * max(row_bytes, default=0)
