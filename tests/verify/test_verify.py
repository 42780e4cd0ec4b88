"""`ctpo verify` passes on what is right, and says what is wrong where something is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from ctpo_megatron import cli
from ctpo_megatron.config import PrefixBudget
from ctpo_megatron.verify import LAYOUTS, OBJECTIVES, LayoutResult, batch, job, run, unsupported_layouts
from ctpo_megatron.verify.layouts import is_by_turn
from tests.support import children
from tests.support import ranks as pool

EVERY_OBJECTIVE = ("one", "cp2-micro")
"""One whole, and one that cuts every sequence, which ratios and means have to bridge."""
KIND = ("ratio_mode", "clip_mode", "loss_agg_mode", "on_kernels", "entropy_coef", "turn_ratio")
KINDS = list(
    {
        (*(getattr(o, each) for each in KIND), isinstance(o.prefix_budget, PrefixBudget), is_by_turn(name)): name
        for name, o in reversed(OBJECTIVES.items())
    }.values()
)
"""One preset of those that differ in numbers alone."""
RECORDED = ("replay-selective", "replay-tp2-sp", "replay-vpp2-full", "replay-cp2-ep2")
TWO_OBJECTIVES = ("one-micro", "tp2-sp", "vpp2-micro", "dp2-distopt", "moe-ep2")


def run_forked(folder: Path, ranks: int, layouts: list[str]) -> str:
    """As `run._run_job`, in processes that have imported everything."""
    pool.run(job.main, folder, layouts, ranks=ranks)
    return ""


@pytest.mark.parametrize(
    ("layouts", "objectives"),
    [
        pytest.param(EVERY_OBJECTIVE[1:], KINDS, marks=pytest.mark.slow, id="every objective"),
        pytest.param(EVERY_OBJECTIVE, KINDS, marks=pytest.mark.slow, id="every objective, whole and cut"),
        pytest.param(TWO_OBJECTIVES, ["ctpo"], id="layouts"),
        pytest.param(TWO_OBJECTIVES, ["ctpo", "grpo"], marks=pytest.mark.slow, id="two objectives"),
        pytest.param(RECORDED, ["ctpo"], marks=pytest.mark.slow, id="recorded experts"),
        pytest.param(TWO_OBJECTIVES, KINDS, marks=pytest.mark.slow, id="all of both"),
    ],
)
def test_a_small_matrix(
    layouts: tuple[str, ...], objectives: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_run_job", run_forked)
    status = cli.main(["verify", "--layouts", *layouts, "--objective", *objectives])
    out, err = capsys.readouterr()
    printed = out + err
    total = len(layouts) * len(objectives)
    assert f"{total} of {total} within 1e-05 of the float64 oracle" in printed and status == 0, printed


@pytest.mark.parametrize(
    ("dtype", "limit"), [pytest.param("float16", "0.01", marks=pytest.mark.slow), ("bfloat16", "0.1")]
)
def test_low_precision_has_a_tolerance_of_its_own(
    dtype: str, limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gradient is without the loss scale, with either head, and so in every layout that carries it on.

    Of an objective without hard bounds: a token near one may be clipped otherwise.
    """
    monkeypatch.setattr(run, "_run_job", run_forked)
    layouts = ["one", "one-logits", "tp2-sp", "pp2-micro", "cp2"]
    status = cli.main(["verify", "--layouts", *layouts, "--dtype", dtype, "--objective", "sapo"])
    printed = capsys.readouterr().out
    assert f"5 of 5 within {limit} of the float64 oracle" in printed and status == 0, printed


@pytest.mark.slow
def test_the_command_starts_its_own_ranks() -> None:
    command = [sys.executable, "-m", "ctpo_megatron.cli", "verify", "--layouts", "tp2-sp-micro"]
    done = children.run(command, deadline_s=280)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "1 of 1 within 1e-05 of the float64 oracle" in done.stdout


def test_unknown_names_are_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--layouts", "tp3"]) == 2
    assert "unknown layout tp3; known: one" in capsys.readouterr().err
    assert cli.main(["verify", "--objective", "ppo"]) == 2
    assert "unknown preset ppo" in capsys.readouterr().err


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A model that `ctpo verify` makes, and whether it has experts."""
    folder = tmp_path_factory.mktemp("made")
    batch.build_model(folder, experts=request.param)
    return folder, request.param


def test_every_layout_of_its_kind_fits_a_model_made_here(made: tuple[Path, bool]) -> None:
    model, experts = made
    reason = "for a dense model" if experts else "for a mixture of experts"
    assert unsupported_layouts(model) == {name: reason for name, layout in LAYOUTS.items() if layout.experts != experts}


def test_a_model_whose_weights_are_cut_short_is_refused(
    made: tuple[Path, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    os.truncate(tmp_path / "model.safetensors", 1000)
    layout = "moe-ep2" if made[1] else "one"
    assert cli.main(["verify", "--model", str(tmp_path), "--layouts", layout]) == 2
    assert "model.safetensors (1000 bytes) is no safetensors file, or is cut short" in capsys.readouterr().err


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The config.json of a dense model with two layers and three heads: nothing that VPP or TP could cut."""
    batch.build_model(tmp_path, experts=False)
    file = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    return tmp_path


def test_a_named_layout_that_does_not_fit_is_refused_with_the_reason(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", "--model", str(short), "--layouts", "one", "moe-ep2", "vpp2", "tp2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and " one " not in err
    assert f"moe-ep2 cannot run {short}: for a mixture of experts\n" in err
    assert f"vpp2 cannot run {short}: policy.virtual_pipeline_model_parallel_size = 2: x pipeline_model_para" in err
    assert "does not divide the model's 3 attention heads; policy.tensor_model_parallel_size = 2: does not" in err


def test_what_does_not_fit_is_skipped_and_said(
    short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("ctpo_megatron.verify.verify", lambda model, layouts, *_: ran.extend(layouts) or [])
    assert cli.main(["verify", "--model", str(short), "--max-ranks", "2"]) == 0
    assert {"one", "pp2", "cp2", "dp2"} <= set(ran) and not {"vpp2", "tp2", "cp4", "moe"} & set(ran)
    lines = [line.split(": ", 2) for line in capsys.readouterr().out.splitlines() if line.startswith("skipped: ")]
    skipped = {name: reason for _, names, reason in lines for name in names.split(", ")}
    assert set(skipped) | set(ran) == set(LAYOUTS) and not set(skipped) & set(ran)
    assert skipped["cp4"] == "more than 2 ranks" and skipped["moe-tp2-sp-ep2"] == "for a mixture of experts"
    assert "does not divide the model's 2 layers" in skipped["vpp2"]


@pytest.mark.parametrize("problem", ["", "lm_head.weight"])
def test_weights_that_an_engine_does_not_compute_with_fail(
    problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctpo_megatron.verify.verify", lambda *_: [])
    monkeypatch.setattr("ctpo_megatron.verify.read_back", lambda: [("weights of an engine, tied", problem)])
    assert cli.main(["verify", "--max-ranks", "1"]) == bool(problem)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"weights of an engine, tied: {problem or 'read back as they were sent'}" + "  FAILED" * bool(
        problem
    )


def test_nothing_to_check_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("ctpo_megatron.verify.LAYOUTS", {"tp2": LAYOUTS["tp2"]})
    assert cli.main(["verify", "--max-ranks", "1"]) == 2
    assert capsys.readouterr() == ("", "ctpo verify: --max-ranks 1 leaves nothing to check; raise it\n")


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory):
    """A folder in which a job has run the layout `one`, and the oracle."""
    folder = tmp_path_factory.mktemp("verify")
    batch.build_model(folder / "model", experts=False)
    oracle = run._prepare(folder, folder / "model", ["ctpo"])
    assert run_forked(folder, 1, ["one"]) == ""
    return folder, oracle


def check_after(truth, change) -> LayoutResult:
    """The check of what the job wrote, once `change` was made to it."""
    folder, oracle = truth
    found = torch.load(folder / "one.pt", weights_only=False)
    change(found)
    torch.save(found, folder / "changed.pt")
    return run._check(folder, "changed", "ctpo", 1, oracle, "")


def test_an_untouched_result_passes(truth) -> None:
    check = check_after(truth, lambda found: None)
    assert check.passed(1e-5) and check.gradient > 0 and check.log_probs > 0


def move_one_token(found) -> None:
    key = next(iter(found["log_probs"]))
    found["log_probs"][key][found["log_probs"][key].nonzero()[0]] += 1e-4


PLANTED = {
    "a tensor": lambda found: found["gradient"]["ctpo"]["model.embed_tokens.weight"].mul_(1.001),
    "a token": move_one_token,
    "the loss": lambda found: found["loss"].update(ctpo=found["loss"]["ctpo"] * 1.0001),
    "the sampler by position": lambda found: found["positions"]["ctpo"].sampler.__imul__(1.0001),
    "the age of a token": lambda found: found["positions"]["ctpo"].ages[0].__isub__(1.0),
}


@pytest.mark.parametrize("what", PLANTED)
def test_every_planted_difference_fails(truth, what: str) -> None:
    check = check_after(truth, PLANTED[what])
    assert not check.passed(1e-5)
    assert what != "a tensor" or check.worst_name == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("lose", "problem"),
    [
        (lambda found: found["log_probs"].popitem(), "every sequence"),
        (lambda found: found["gradient"]["ctpo"].pop("model.norm.weight"), "model.norm.weight"),
    ],
)
def test_what_is_missing_is_named(truth, lose, problem: str) -> None:
    assert problem in check_after(truth, lose).problem


@pytest.mark.slow  # a process that imports everything
def test_a_job_that_dies_is_reported(tmp_path: Path) -> None:
    problem = run._run_job(tmp_path, 1, ["one"])
    assert "work.pickle" in problem


@pytest.mark.parametrize(
    ("dies_in", "expected"),
    [
        ("vpp2", [("tp2", ""), ("vpp2", "killed"), ("cp2", ""), ("dp2", "")]),
        ("dp2", [("tp2", ""), ("vpp2", ""), ("cp2", ""), ("dp2", "killed")]),
        ("after all", [("tp2", ""), ("vpp2", ""), ("cp2", ""), ("dp2", "killed")]),
    ],
)
def test_the_layout_that_a_job_died_in_is_blamed_and_the_rest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str, expected: list[tuple[str, str]]
) -> None:
    def job(folder: Path, ranks: int, layouts: list[str]) -> str:
        for name in layouts:
            if name == dies_in:
                return "killed"
            (folder / f"{name}.pt").touch()
        return "killed" if dies_in == "after all" else ""

    monkeypatch.setattr(run, "_run_job", job)
    assert list(run._run_all(tmp_path, 2, ["tp2", "vpp2", "cp2", "dp2"])) == expected


def test_the_reason_is_whole_lines_of_the_rank_that_spoke_first() -> None:
    noise = [f"W1121 noise {index}" for index in range(9)]
    spoken = [f"[rank1]:   line {index} of the traceback" for index in range(200)]
    answer = ["[rank0]: RuntimeError: connection closed by peer", "[rank1]: ValueError: the cause"]
    lines = run._reason("\n".join([*noise, *spoken, *answer])).splitlines()
    assert lines[-1] == " ValueError: the cause" and len(lines) > 50
    assert all(line.startswith("   line ") for line in lines[:-1])
