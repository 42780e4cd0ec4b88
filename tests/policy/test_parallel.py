"""Ranks wait for what rank 0 does alone, however long it takes."""

from __future__ import annotations

from pathlib import Path

from jobs import run_job


def test_work_of_rank_0_may_take_longer_than_a_collective(tmp_path: Path) -> None:
    settings = {"timeout_s": 3.0, "work_s": 6.0}
    assert run_job("wait_scenario.py", tmp_path, tmp_path / "found.pt", 2, settings) == ["done", "done"]
