"""The benchmarks run on a CPU, and say what they should about goals, rivals and failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import __main__ as bench
from benchmarks.kernels import goals, measure, roofline, suite_loss
from tests.support import children, ranks

pytestmark = pytest.mark.slow  # benchmarks are run by hand: weekly is often enough
ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: torch.compile and a process group of one stay there."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", module, *arguments]
    return children.run(command, environment=environ, directory=ROOT, deadline_s=120)


@pytest.mark.parametrize("suites", ["D", "A B C D"], ids=["exactness", "all"])
def test_suites_run_and_measure_what_a_cpu_can(suites: str, tmp_path: Path) -> None:
    chosen = suites.split()
    arguments = ["--device", "cpu", "--quick", "--suite", *chosen, "--out", str(tmp_path)]
    done = ranks.prefork().run(bench.main, arguments, deadline_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "kernels-cpu-quick.json").read_text())
    assert {record["suite"] for record in content["records"]} == {"ceilings", *chosen}
    for record in content["records"]:
        assert "failed" not in record, record
        assert "value" in record or record.get("seconds", 0) > 0 or record.get("not_run"), record
    verdicts = {goal["goal"]: goal["verdict"] for goal in content["goals"]}
    assert verdicts["D, largest log-prob error against float64"] == "met"
    assert verdicts["D, share of checks with equal bits"] == "met"
    # No time of a CPU may pass for a GPU's.
    assert {verdict for goal, verdict in verdicts.items() if goal[0] != "D"} == {"not measured"}
    same = [r["value"] for r in content["records"] if r["case"] == "|loss - ours|" and "value" in r]
    assert same and max(same) < 1e-5
    assert (tmp_path / "kernels-cpu-quick.md").read_text().startswith("# Kernels")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_suites_run_on_a_gpu(tmp_path: Path) -> None:
    done = run("benchmarks.kernels", "--device", "cuda", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads((tmp_path / "kernels-cuda-quick.json").read_text())["records"]
    forward = [record for record in records if record["suite"] == "A" and record["side"] == "forward"]
    assert forward and all((record["launches"] or 0) <= 3 and record["syncs"] == 0 for record in forward)
    assert all(record["graph_s"] > 0 and record["peak_bytes"] > 0 for record in forward)


def test_heads_on_a_cpu(tmp_path: Path) -> None:
    done = run("benchmarks.kernels.cpu_head", "--quick", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "kernels-cpu-head.json").read_text())
    assert {(row["head"], row["masked"]) for row in content["rows"]} == {
        (head, masked) for head in ("eager", "recompute", "streaming") for masked in (0.0, 0.6)
    }
    assert all(error <= 1e-5 for error in content["agreement"].values())


def session(deadline_s: float = 60) -> measure.Session:
    return measure.Session("cpu", quick=True, deadline_s=deadline_s)


def test_a_rival_that_cannot_run_is_listed_and_ours_counts_as_a_failure() -> None:
    def refuse() -> list[measure.Call]:
        raise ModuleNotFoundError("No module named 'rival'")

    found = session()
    found.measure("B", "case", "rival", refuse)
    found.measure("B", "case", "ours", refuse, ours=True)
    rival, ours = found.records
    assert rival["not_run"] == "ModuleNotFoundError: No module named 'rival'" and "failed" not in rival
    assert ours["failed"] == rival["not_run"] and "traceback" in ours


def test_nothing_starts_after_the_deadline() -> None:
    started: list[int] = []
    found = session(deadline_s=0)
    found.measure("A", "case", "ours", lambda: [lambda: started.append(1)], ours=True)
    assert found.records[0]["not_run"] == "deadline" and not started


def test_a_broken_gate_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    wrong = suite_loss.kernel
    monkeypatch.setattr(suite_loss, "kernel", lambda batch: -wrong(batch))
    assert bench.main(["--device", "cpu", "--quick", "--suite", "A"]) == 1
    assert "BROKEN: suite A: AssertionError: the gradient of ctpo_loss is off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at_least", "stretch", "verdicts"),
    [
        (True, 3.0, {1.0: "MISSED", 2.0: "met", 3.0: "stretch met", None: "not measured"}),
        (False, 1.0, {3.0: "MISSED", 2.0: "met", 0.9: "stretch met"}),
    ],
)
def test_verdicts(at_least: bool, stretch: float, verdicts: dict[float | None, str]) -> None:
    assert {value: goals.Goal("a", "x", value, 2.0, stretch, at_least).verdict() for value in verdicts} == verdicts


def test_goals_on_a_gpu_come_from_the_records() -> None:
    found = session()
    found.cuda, found.ceilings = True, {"copy_bytes_per_s": 3e12, "matmul_flops_per_s": 8e14}
    found.records += [
        {"suite": "A", "case": goals.SMALL, "side": "forward", "graph_s": 8e-6, "launches": 3, "syncs": 1},
        {"suite": "C", "case": goals.MAIN, "side": goals.BARE, "seconds": 0.2},
        {"suite": "C", "case": goals.MAIN, "side": "streaming", "seconds": 0.25},
    ]
    rows = {goal.name: goal for goal in goals.goals(found)}
    assert rows["A, 32k tokens: loss, gradient, statistics, graph replay"].measured == pytest.approx(8)
    assert rows["A, 32k tokens: launches"].verdict() == "met"
    assert rows["A, 32k tokens: host synchronisations"].verdict() == "MISSED"
    assert rows[f"C, {goals.MAIN}: share of the bare products"].measured == pytest.approx(0.8)
    assert rows[f"C, {goals.MAIN}: share of the bare products"].verdict() == "MISSED"


def test_a_picture_needs_no_gpu(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert", reason="vl-convert-python is not installed")
    found = session()
    found.ceilings = {"copy_bytes_per_s": 3e12, "matmul_flops_per_s": 8e14}
    found.measure("B", "case", "side", lambda: [lambda: torch.ones(10).sum()], bytes_moved=40)
    assert roofline.draw(found, tmp_path / "roof.png", "title") == ""
    assert (tmp_path / "roof.png").stat().st_size > 1000


@pytest.mark.parametrize(("arguments", "named"), [(["--device", "cpu"], "--quick"), (["--suite", "E"], "E")])
def test_bad_arguments_are_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err
