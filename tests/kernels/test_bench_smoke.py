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
from benchmarks.kernels import suite_loss
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


def test_a_broken_gate_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    wrong = suite_loss.kernel
    monkeypatch.setattr(suite_loss, "kernel", lambda batch: -wrong(batch))
    assert bench.main(["--device", "cpu", "--quick", "--suite", "A"]) == 1
    assert "BROKEN: suite A: AssertionError: the gradient of ctpo_loss is off" in capsys.readouterr().out
