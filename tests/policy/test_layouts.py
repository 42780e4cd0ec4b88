"""The same training under every offered parallel layout, real processes and collectives; checkpoints across layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from jobs import Results, run_job

run = partial(run_job, "scenario.py")
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
BF16 = {"dtype": "bfloat16"}
EP2 = {"expert_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
DISTOPT = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for family in ("qwen3-tied", "qwen3-untied", "qwen3-moe"):
        models.build(family, root / family)
    return root


@pytest.fixture(scope="module")
def one(folder: Path) -> Results:
    checkpoints = folder / "single"
    return run(
        folder,
        folder / "one.pt",
        1,
        {
            "single": {"save": str(checkpoints)},
            "again": {},
            "recompute": {"policy": {"recompute": "full"}},
            "bfloat16": {"policy": BF16},
            "untied-gspo": {"family": "qwen3-untied", "preset": "gspo"},
            "bfloat16-distopt": {"policy": BF16 | DISTOPT},
            "bfloat16-offload": {"policy": BF16 | DISTOPT | {"offload": "all"}},
            "moe": {"family": "qwen3-moe"},
            "resumed": {"load": str(checkpoints / "step_000001")},
        },
    )


@pytest.fixture(scope="module")
def two(folder: Path, one: Results) -> Results:
    return run(
        folder,
        folder / "two.pt",
        2,
        {
            "tp2": {"policy": TP2, "save": str(folder / "tp2")},
            "pp2": {"policy": PP2},
            "vpp2": {"policy": VPP2, "save": str(folder / "vpp2")},
            "cp2": {"policy": CP2},
            "tp2-sp": {"policy": TP2 | {"sequence_parallel": True}},
            "dp2": {},
            "dp2-distopt": {"policy": DISTOPT, "save": str(folder / "dp2-distopt")},
            "dp2-distopt-overlap": {"policy": DISTOPT | OVERLAP},
            "untied-gspo": {"family": "qwen3-untied", "preset": "gspo", "policy": PP2},
            "moe-ep2": {"family": "qwen3-moe", "policy": EP2, "save": str(folder / "moe-ep2")},
            "from-one": {"policy": VPP2, "load": str(folder / "single" / "step_000001")},
        },
    )


@pytest.fixture(scope="module")
def resharded(folder: Path, two: Results) -> Results:
    loads = {name: str(folder / name / "step_000001") for name in ("tp2", "vpp2", "dp2-distopt")}
    return run(
        folder,
        folder / "resharded.pt",
        1,
        {
            "tp2": {"load": loads["tp2"]},
            "vpp2": {"load": loads["vpp2"]},
            "dp2-distopt": {"load": loads["dp2-distopt"], "policy": DISTOPT},
        },
    )


def assert_same_training(found: dict[str, Any], expected: dict[str, Any], steps: slice = slice(None)) -> None:
    """Loss, gradient norm and log-probs within 1e-4 relative, and the same path of the weights within 1e-3.

    Adam turns a gradient near zero into a step of either sign, so single weights may part by more than rounding:
    the whole update is compared, relative to its size.
    """
    assert len(found["steps"]) == len(expected["steps"][steps])
    for ours, theirs in zip(found["steps"], expected["steps"][steps], strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch/logp_abs_mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), name
        assert ours["pg_update/first_log_ratio_abs_max"] <= 1e-5
    for name, tensor in expected["weights"].items():
        moved = (tensor - expected["before"][name]).norm()
        assert (found["weights"][name] - tensor).norm() <= 1e-3 * moved, name


def assert_identical(found: dict[str, Any], expected: dict[str, Any], steps: slice = slice(None)) -> None:
    assert found["steps"] == expected["steps"][steps]
    assert all(torch.equal(found["weights"][name], tensor) for name, tensor in expected["weights"].items())


def test_one_rank_twice_is_bit_for_bit(one: Results) -> None:
    assert_identical(one["again"], one["single"])


def test_resume_continues_bit_for_bit(one: Results) -> None:
    assert_identical(one["resumed"], one["single"], slice(1, None))


def test_recompute_changes_nothing(one: Results) -> None:
    assert_same_training(one["recompute"], one["single"])


def test_bfloat16_trains(one: Results) -> None:
    for ours, theirs in zip(one["bfloat16"]["steps"], one["single"]["steps"], strict=True):
        assert ours["pg_update/first_log_ratio_abs_max"] <= 1e-5
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=0.1)


def test_memory_given_back_between_steps_changes_nothing(one: Results) -> None:
    assert_identical(one["bfloat16-offload"], one["bfloat16-distopt"])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "vpp2", "cp2", "tp2-sp", "dp2", "dp2-distopt", "dp2-distopt-overlap"])
def test_two_ranks_equal_one(one: Results, two: Results, layout: str) -> None:
    assert_same_training(two[layout], one["single"])


def test_untied_pipeline_with_gspo_equals_one(one: Results, two: Results) -> None:
    assert_same_training(two["untied-gspo"], one["untied-gspo"])


def test_experts_on_two_ranks_equal_one(one: Results, two: Results) -> None:
    assert_same_training(two["moe-ep2"], one["moe"])


def test_a_checkpoint_of_one_rank_resumes_on_two(one: Results, two: Results) -> None:
    assert_same_training(two["from-one"], one["single"], slice(1, None))


@pytest.mark.parametrize("layout", ["tp2", "vpp2", "dp2-distopt"])
def test_two_rank_checkpoint_resumes_on_one(one: Results, resharded: Results, layout: str) -> None:
    assert_same_training(resharded[layout], one["single"], slice(1, None))
