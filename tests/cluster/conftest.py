"""The Slurm that the tests of this folder share, and a recording to train on without engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.local_slurm import Slurm, local_slurm
from tests.cluster.packages import COMMAND, missing
from tests.end_to_end.small_run import Ctpo

RECORDED = ("run.steps=6", "eval.every=0", "data.eval=[]", "export.enabled=false", "tracking.report=false")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if names := missing():
        pytest.fail(f"{', '.join(names)} is missing: {COMMAND}")
    with local_slurm() as running:
        yield running


@pytest.fixture(scope="session")
def ctpo(tmp_path_factory: pytest.TempPathFactory) -> Ctpo:
    return Ctpo(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="session")
def recorded(ctpo: Ctpo) -> Path:
    """The directory of a run whose trajectories others are trained on, and which has exported its last weights."""
    done = ctpo.launch("run.name=recorded", *RECORDED, "export.enabled=true")
    assert done.returncode == 0, done.stderr[-4000:]
    return ctpo.directory / "runs" / "recorded"
