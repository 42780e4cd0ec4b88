"""A made-up run with its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.report import write_report
from tests.tracking.synthetic_run import HOSTILE, write_run


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run directory with its report; read only. Its model wrote markup into every answer."""
    run_dir = write_run(tmp_path_factory.mktemp("runs"), final=f"{HOSTILE} \\boxed{{2}}.")
    write_report(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def page(demo_run: Path) -> str:
    """Its report."""
    return (demo_run / "report.html").read_text(encoding="utf-8")
