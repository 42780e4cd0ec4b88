"""Save under one layout, resume under another that may pad the vocabulary otherwise: the next step is the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import CheckpointError, Layout, Trainer
from tests.policy import models, scenario
from tests.policy.jobs import CP2, DISTOPT, EP2, PP2, TP2, VPP2, Jobs, Results, run_job

run = partial(run_job, scenario.run)
MOE, PADDED = {"family": "qwen3-moe"}, {"family": "padded"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reshard")
    models.build("qwen3-tied", root / "qwen3-tied", layers=4)  # two parts of each of two ranks
    models.build("qwen3-tied", root / "padded", layers=2, vocab_size=600)  # 640 rows on one rank, 768 on two
    models.build("qwen3-moe", root / "qwen3-moe", layers=2)
    return root


@pytest.fixture(scope="module")
def one(folder: Path) -> Results:
    """Two steps on one rank, saved after the first."""
    return run(
        folder,
        1,
        {
            "plain": {"save": str(folder / "plain")},
            "distopt": {"save": str(folder / "distopt"), "policy": DISTOPT},
            "padded": PADDED | {"save": str(folder / "padded-one")},
            "moe": MOE | {"save": str(folder / "moe")},
        },
    )


@pytest.fixture(scope="module")
def two(folder: Path, one: Results) -> Jobs:
    """The second step on two ranks from one rank's checkpoints, and two steps saved by two ranks."""
    plain, distopt = (str(folder / name / "step_000001") for name in ("plain", "distopt"))
    usual = {
        "tp2": {"load": plain, "policy": TP2},
        "padded": PADDED | {"load": str(folder / "padded-one" / "step_000001"), "policy": TP2},
        "save-padded": PADDED | {"save": str(folder / "saved-padded"), "policy": TP2},
        "save-vpp2": {"save": str(folder / "saved-vpp2"), "policy": VPP2, "asynchronous": True},
        "pp2-from-vpp2": {"load": str(folder / "saved-vpp2" / "step_000001"), "policy": PP2},
        "moe-ep2": MOE | {"load": str(folder / "moe" / "step_000001"), "policy": EP2},
    }
    more = {
        "save-moe-ep2-distopt": MOE | {"save": str(folder / "saved-moe-ep2-distopt"), "policy": EP2 | DISTOPT},
        "vpp2": {"load": plain, "policy": VPP2},
        "cp2": {"load": plain, "policy": CP2},
        "dp2-distopt": {"load": distopt, "policy": DISTOPT},
        "save-tp2-distopt": {"save": str(folder / "saved-tp2-distopt"), "policy": TP2 | DISTOPT},
        "save-moe-ep2": MOE | {"save": str(folder / "saved-moe-ep2"), "policy": EP2},
    }
    return Jobs(partial(run, folder, 2), usual, more)


BACK = {"vpp2": {}, "padded": PADDED}
MORE_BACK = {"moe-ep2-distopt": MOE | {"policy": DISTOPT}, "moe-ep2": MOE, "tp2-distopt": {"policy": DISTOPT}}


@pytest.fixture(scope="module")
def back(folder: Path) -> Jobs:
    """The second step on one rank from two ranks' checkpoints."""
    jobs = [
        {name: {"load": str(folder / f"saved-{name}" / "step_000001")} | how for name, how in each.items()}
        for each in (BACK, MORE_BACK)
    ]
    return Jobs(partial(run, folder, 1), *jobs)


SAVED = pytest.mark.parametrize("name", ["vpp2", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_BACK)])
"""By two ranks."""


@SAVED
def test_every_file_of_every_rank_is_in_the_manifest(folder: Path, two: Jobs, name: str) -> None:
    assert two[f"save-{name}"]
    checkpoint = folder / f"saved-{name}" / "step_000001"
    listed = json.loads((checkpoint / "COMPLETE.json").read_text())["files"]
    assert {*listed, "COMPLETE.json"} == {path.name for path in checkpoint.iterdir()}
    assert {file[:4] for file in listed if file.endswith(".distcp")} == {"__0_", "__1_"}


def assert_same_next_step(found: Jobs, one: Results, name: str) -> None:
    (ours,) = found[name]["steps"]
    reference = one["moe" if name.startswith("moe") else "plain"]
    theirs = reference["steps"][1]
    assert ours["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=0, abs=1e-6)
    assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-5)
    assert ours["actor/lr"] == theirs["actor/lr"]
    # The loss says nothing about the optimizer's state: the path of the weights has to be the same too.
    for tensor, expected in reference["weights"].items():
        moved = (expected - reference["before"][tensor]).norm()
        assert (found[name]["weights"][tensor] - expected).norm() <= 1e-3 * moved, tensor


@pytest.mark.parametrize(
    "name",
    ["tp2", "pp2-from-vpp2", "moe-ep2"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("vpp2", "cp2", "dp2-distopt")],
)
def test_two_ranks_go_on(one: Results, two: Jobs, name: str) -> None:
    assert_same_next_step(two, one, name)


@SAVED
def test_one_rank_goes_on(one: Results, two: Jobs, back: Jobs, name: str) -> None:
    assert two[f"save-{name}"]
    assert_same_next_step(back, one, name)


def test_a_vocabulary_may_be_padded_differently_but_not_be_another_one(
    folder: Path, one: Results, two: Jobs, back: Jobs, layout: Layout
) -> None:
    assert two["save-padded"]
    for resumed in (two["padded"], back["padded"]):
        for name in ("actor/pg_loss", "actor/grad_norm"):
            expected = one["padded"]["steps"][1][name]
            assert resumed["steps"][0][name] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    models.build("qwen3-tied", folder / "larger", layers=2, vocab_size=900)
    policy = Trainer(PolicyConfig(), layout, folder / "larger", temperature=1.0)
    with pytest.raises(CheckpointError, match=r"embedding.*768x96 in the checkpoint and float32 1024x96 here"):
        policy.load_weights(folder / "saved-padded" / "step_000001")
