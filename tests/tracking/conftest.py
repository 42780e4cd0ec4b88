"""A fixture over made-up run directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.config.schema import Config
from tests.tracking.synthetic_run import make_config


@pytest.fixture
def config_in(tmp_path: Path) -> Callable[..., Config]:
    """Makes configurations whose run directory is below the test's own folder."""
    return lambda **sections: make_config(tmp_path / "runs", **sections)
