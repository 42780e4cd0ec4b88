"""Save under one parallel layout, resume under another: the next step is the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import models
import pytest
from jobs import Results, run_job

run = partial(run_job, "scenario.py")
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
DISTOPT = {"use_distributed_optimizer": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reshard")
    models.build("qwen3-tied", root / "qwen3-tied")
    return root


@pytest.fixture(scope="module")
def one(folder: Path) -> Results:
    """Two steps on one rank, saved after the first."""
    return run(
        folder,
        folder / "one.pt",
        1,
        {"plain": {"save": str(folder / "plain")}, "distopt": {"save": str(folder / "distopt"), "policy": DISTOPT}},
    )


@pytest.fixture(scope="module")
def two(folder: Path, one: Results) -> Results:
    """The second step on two ranks from one rank's checkpoints, and two steps saved by two ranks."""
    plain, distopt = (str(folder / name / "step_000001") for name in ("plain", "distopt"))
    return run(
        folder,
        folder / "two.pt",
        2,
        {
            "tp2": {"load": plain, "policy": TP2},
            "pp2": {"load": plain, "policy": PP2},
            "dp2-distopt": {"load": distopt, "policy": DISTOPT},
            "save-tp2-distopt": {"save": str(folder / "tp2-distopt"), "policy": TP2 | DISTOPT},
            "save-pp2": {"save": str(folder / "pp2"), "policy": PP2},
            "tp2-from-pp2": {"load": str(folder / "pp2" / "step_000001"), "policy": TP2},
        },
    )


@pytest.fixture(scope="module")
def back(folder: Path, two: Results) -> Results:
    """The second step on one rank from two ranks' checkpoints."""
    return run(
        folder,
        folder / "back.pt",
        1,
        {
            "pp2": {"load": str(folder / "pp2" / "step_000001")},
            "tp2-distopt": {"load": str(folder / "tp2-distopt" / "step_000001"), "policy": DISTOPT},
        },
    )


def assert_same_next_step(found: Results, one: Results, name: str) -> None:
    (ours,) = found[name]["steps"]
    theirs = one["plain"]["steps"][1]
    assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=0, abs=1e-6)
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5)
    assert ours["actor/lr"] == theirs["actor/lr"]
    # The loss says nothing about the optimizer's state: the path of the weights has to be the same too.
    for tensor, expected in one["plain"]["weights"].items():
        moved = (expected - one["plain"]["before"][tensor]).norm()
        assert (found[name]["weights"][tensor] - expected).norm() <= 1e-3 * moved, tensor


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2-distopt", "tp2-from-pp2"])
def test_two_ranks_go_on(one: Results, two: Results, name: str) -> None:
    assert_same_next_step(two, one, name)


@pytest.mark.parametrize("name", ["pp2", "tp2-distopt"])
def test_one_rank_goes_on(one: Results, back: Results, name: str) -> None:
    assert_same_next_step(back, one, name)
