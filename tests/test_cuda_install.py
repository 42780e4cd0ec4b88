"""docs/install_cuda.md is the recipe of `make test-cuda-environment`: its blocks are found, for each Python."""

from __future__ import annotations

import pytest

from tests.cuda_environment.install import PAGE, ROOT, commands


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_of_this_python_is_installed_by_its_hashes(python: str) -> None:
    lines = commands(PAGE.read_text(encoding="utf-8"), "lock", python)
    lock = f"requirements/cuda-{python}.txt"
    assert (ROOT / lock).exists()
    assert lines[0] == f"pip install --no-deps --require-hashes -r {lock}"
    assert lines[1].endswith("-e ./answers -e ./kernels -e .")
    assert len(lines) == 2


@pytest.mark.parametrize(("python", "version"), [("3.11", "2.11.0"), ("3.12", "2.20.2")])
def test_all_parts_of_transformer_engine_have_one_version(python: str, version: str) -> None:
    lines = commands(PAGE.read_text(encoding="utf-8"), "transformer-engine", python)
    parts = [word for line in lines for word in line.split() if word.startswith("transformer-engine")]
    assert {part.split("==")[1] for part in parts} == {version}
    assert len(parts) == 3
    assert not any("transformer_engine.pytorch" in line for line in lines)
