"""The compile gate on the Triton that the lock for CUDA machines gives users, which is not the one of the tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kernels.compiling import PACKAGES, gate
from tests.support import children

LOCK = Path(__file__).parents[2] / "requirements" / f"cuda-{sys.version_info.major}.{sys.version_info.minor}.txt"


@pytest.fixture(scope="module")
def locked_triton(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Version and folder; installed once an environment (0.7 GB), by the hashes of the lock."""
    pinned = re.search(r"^triton==(\S+).*?[^\\]\n", LOCK.read_text(), re.MULTILINE | re.DOTALL)
    assert pinned is not None
    version, folder = pinned.group(1), Path(sys.prefix) / f"triton-{pinned.group(1)}"
    if not folder.exists():
        requirements = tmp_path_factory.mktemp("lock") / "triton.txt"
        requirements.write_text(pinned.group(0))
        unfinished = folder.with_suffix(".unfinished")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        done = children.run([*pip, "--target", str(unfinished), "-r", str(requirements)], deadline_s=600)
        assert done.returncode == 0, done.stderr
        unfinished.rename(folder)
    return version, folder


@pytest.mark.slow
def test_every_configuration_fits_on_the_locked_triton(locked_triton: tuple[str, Path], tmp_path: Path) -> None:
    version, folder = locked_triton
    path = f"{folder}:{PACKAGES}"
    done = gate("--arch", "90", deadline_s=900, PYTHONPATH=path, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"triton {version}:" in done.stdout
