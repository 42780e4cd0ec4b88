"""What the guard of speed measures and reports; the runs themselves take minutes and are not made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import guard
from benchmarks.guard import STORED_SIDE, TREE, Pair, figures, lost
from benchmarks.measured import Moment, Observed


def run(**rows: float) -> dict[str, Any]:
    return {"rows": rows | {guard.ALL: 10.0}, "rewards": [0.5], "wall": 10.0, "others_cpu": 0.0}


def pairs(*updates: tuple[float, float]) -> list[Pair]:
    return [{STORED_SIDE: run(update=stored), TREE: run(update=tree)} for stored, tree in updates]


def test_figures_are_those_of_the_counted_steps() -> None:
    moments = [Moment(step, 2.0 * step, {"trainer": 5.0 + 3.0 * step, "Ray": 1.0 + step}, 0.0) for step in range(4)]
    lines = [
        {"step": step, "reward/mean": 0.1 * step, "time/update": 9.0, "time/update_cpu": float(step)}
        | ({"time/dump_cpu": 1.0} if step == 3 else {})
        for step in range(4)
    ]
    found = figures(Observed(moments, 0.0, {}, lines))
    assert found["rows"] == {
        "phase dump": 0.5,
        "phase update": 2.5,
        "part Ray": 1.0,
        "part trainer": 3.0,
        guard.ALL: 4.0,
        "start of the run": 6.0,
    }
    assert found["rewards"] == [0.2, pytest.approx(0.3)]


def test_lost_is_what_every_pair_has_lost() -> None:
    assert lost(pairs((1.0, 1.06), (1.0, 1.2))) == ["update"]
    assert lost(pairs((1.0, 1.04), (1.0, 1.2))) == []  # within the pairs' noise
    assert lost(pairs((1.2, 1.0))) == []
    assert lost(pairs((0.1, 0.15))) == []  # next to nothing of the step


def test_the_stored_commit_is_checked_out(tmp_path: Path) -> None:
    """A clone without history cannot say."""
    commit = json.loads(guard.STORED.read_text())["commit"]
    known = subprocess.run(["git", "cat-file", "-e", commit], cwd=guard.runs.ROOT, check=False, capture_output=True)
    if known.returncode:
        pytest.skip("the repository's history is not here")
    root = guard.checked_out(commit, tmp_path)
    assert (root / "ctpo_megatron" / "train.py").exists()
    assert guard.environment(root)["PYTHONPATH"].startswith(f"{root}:")
    with pytest.raises(subprocess.CalledProcessError):
        guard.checked_out("no-such-commit", tmp_path)
