"""One uninterrupted small run, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo


@pytest.fixture(scope="session")
def ctpo(tmp_path_factory: pytest.TempPathFactory) -> Ctpo:
    return Ctpo(tmp_path_factory.mktemp("end_to_end"))


@pytest.fixture(scope="session")
def finished(ctpo: Ctpo) -> Path:
    """The run directory of an uninterrupted run; its output is in `output.txt` there, its imports in `imports.txt`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # all processes list their imports
        done = ctpo.launch("run.name=whole")
    assert done.returncode == 0, done.stderr[-4000:]
    run = ctpo.directory / "runs" / "whole"
    (run / "output.txt").write_text(done.stdout)
    (run / "imports.txt").write_text(done.stderr)
    return run
