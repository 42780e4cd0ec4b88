"""The branch of the policy that CUDA takes, on claimed devices and with CUDA's rules, and what it waits for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rehearsal import start
from tests.rehearsal.budget import over_budget
from tests.rehearsal.cases import CASES, Case
from tests.support import ranks


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ranks.run(start.build_models, folder, pretend_cuda=True)
    return folder


def test_every_pair_of_choices_is_rehearsed() -> None:
    choices = [(c.adam, c.ranks, c.family, c.dtype, c.head, c.distributed) for c in CASES]
    for (i, first), (j, second) in itertools.combinations(enumerate(map(set, zip(*choices, strict=True))), 2):
        missing = set(itertools.product(first, second)) - {(choice[i], choice[j]) for choice in choices}
        assert not missing, missing


def test_each_choice_is_part_of_the_quick_ones() -> None:
    def values(cases: Sequence[Case]) -> list[set[object]]:
        chosen = [(c.adam, c.ranks, c.family, c.dtype, c.head, c.distributed) for c in cases]
        return [set(column) for column in zip(*chosen, strict=True)]

    assert values([case for case in CASES if case.quick]) == values(CASES)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.quick else pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
def test_training_on_pretended_gpus(case: Case, models_dir: Path, tmp_path: Path) -> None:
    """Save at step 0, update, save, update; the same again from both checkpoints; offload, export, weights out."""
    reports = ranks.run(start.rehearse, case, models_dir, tmp_path, ranks=case.ranks, pretend_cuda=True)
    for rank, report in enumerate(reports):
        over = over_budget(report.counts, report.passes, case)
        assert not over, f"rank {rank} waits for the device too often:\n" + "\n".join(over)


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        *(pytest.param(family, "float32", 1e-3, marks=pytest.mark.slow) for family in start.FAMILIES),
        ("qwen3-tied", "bfloat16", 0.1),
    ],
)
def test_the_tests_that_wait_for_a_gpu_run(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    """tests/gpu/test_policy_cuda.py: log-probs as transformers gives them on the CPU, and an update."""
    arguments = (family, dtype, tolerance, tmp_path)
    ranks.run(start.gpu_test, "test_log_probs_and_one_update", *arguments, pretend_cuda=True)
