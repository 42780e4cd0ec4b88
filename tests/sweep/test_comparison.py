"""A sweep ends in the comparison of its runs."""

from __future__ import annotations

from pathlib import Path

from ctpo_megatron.base.run_paths import SweepPaths
from ctpo_megatron.cli.sweep import _compare
from tests.tracking.synthetic_run import write_run


def test_the_runs_are_on_one_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, steps=3) for name in ("ctpo", "grpo")]
    page = SweepPaths(tmp_path).comparison
    said = _compare(runs, page)
    assert said.startswith(f"comparison: {page} (again: ctpo compare {runs[0]} {runs[1]} --out")
    assert "2 runs" in page.read_text()
