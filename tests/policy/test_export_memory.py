"""Handing weights on needs no more memory than the largest parameter, in any layout; rank 0 writes shard by shard."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.policy import export_memory_scenario, models
from tests.policy.jobs import PP2, TP2, run_job

run = partial(run_job, export_memory_scenario.run)
# The largest parameter: the embedding of a large vocabulary, or gate and up of a wide MLP.
SHAPES = {
    "vocabulary": {"vocab_size": 64000, "hidden_size": 512, "intermediate_size": 512},
    "wide": {"vocab_size": 500, "hidden_size": 1024, "intermediate_size": 16384},
}
LARGEST = {"vocabulary": 64000 * 512 * 4, "wide": 2 * 16384 * 1024 * 4}
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "vocabulary": (1, {"family": "vocabulary"}),
    "vocabulary-tp2": (2, {"family": "vocabulary", "policy": TP2}),
    "vocabulary-pp2": (2, {"family": "vocabulary", "policy": PP2}),
    "wide-tp2": (2, {"family": "wide", "policy": TP2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_peak_extra_memory_is_at_most_the_largest_parameter_and_a_shard(name: str, tmp_path: Path) -> None:
    shape = name.split("-")[0]
    models.build("qwen3-untied", tmp_path / shape, layers=2, head_dim=64, **SHAPES[shape])
    ranks, job = JOBS[name]
    largest = LARGEST[shape]
    for rank, peaks in enumerate(run(tmp_path, ranks, {name: job | {"shard_bytes": largest}})[name]["ranks"]):
        shard = largest if rank == 0 else 0
        assert peaks["sync"] <= 1.2 * largest and peaks["export"] <= 1.2 * (largest + shard), (rank, peaks)
