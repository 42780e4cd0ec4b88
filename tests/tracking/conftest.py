"""Fixtures over made-up run directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.config.schema import Config
from ctpo_megatron.tracking import write_report
from tests.tracking.synthetic_run import HOSTILE, make_config, write_run


@pytest.fixture
def config_in(tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations whose run directory is below the test's own folder."""
    return lambda **sections: make_config(tmp_path / "runs", **sections)


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run directory with its report; read only. Its model wrote markup into every answer."""
    run_dir = write_run(tmp_path_factory.mktemp("runs"), final=f"{HOSTILE} \\boxed{{2}}.")
    write_report(run_dir)
    return run_dir
