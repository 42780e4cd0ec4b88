"""What `policy.router_replay` is for: with the experts of the sampler, a mixture differs from it as a dense model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.router_replay import measure

MEAN, LARGEST = "mismatch/log_prob_abs_mean", "mismatch/log_prob_abs_max"


@pytest.mark.slow  # vLLM takes eight seconds to import, and each side is a process of its own
@pytest.mark.parametrize(
    ("dtype", "perturbation"), [("bfloat16", 0.0), ("float32", 0.001)], ids=["bfloat16", "perturbed"]
)
def test_recorded_experts_take_the_mismatch_to_the_level_of_a_dense_model(
    dtype: str, perturbation: float, tmp_path: Path
) -> None:
    small = {"count": 16, "tokens": 120}
    [dense] = measure(tmp_path / "dense", experts=False, dtype="bfloat16", perturbation=0.0, **small)
    live, replayed = measure(tmp_path / "experts", experts=True, dtype=dtype, perturbation=perturbation, **small)
    assert live[LARGEST] > 3 * dense[LARGEST]  # a token that went to other experts
    assert replayed[LARGEST] < 1.5 * dense[LARGEST] and replayed[MEAN] < 1.2 * dense[MEAN]
    assert live[MEAN] > 2 * replayed[MEAN]
    assert 0.9 < replayed["mismatch/router_agreement"] < 1 and replayed["mismatch/router_unrecorded"] == 0
