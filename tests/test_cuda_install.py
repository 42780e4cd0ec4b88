"""docs/install_cuda.md is the recipe of `make test-cuda-environment`: its blocks are found, and name one version."""

from __future__ import annotations

from tests.cuda_environment.install import PAGE, ROOT, commands


def test_the_lock_is_installed_by_its_hashes() -> None:
    lines = commands(PAGE.read_text(encoding="utf-8"), "lock")
    (lock,) = (ROOT / "requirements").glob("cuda-*.txt")
    assert lines[0] == f"pip install --no-deps --require-hashes -r requirements/{lock.name}"
    assert lines[1].endswith("-e ./answers -e ./kernels -e .")
    assert len(lines) == 2


def test_all_parts_of_transformer_engine_have_one_version() -> None:
    """That of the page, and of the extra `te` for uv."""
    lines = commands(PAGE.read_text(encoding="utf-8"), "transformer-engine")
    parts = [word for line in lines for word in line.split() if word.startswith("transformer-engine")]
    (version,) = {part.split("==")[1] for part in parts}
    assert len(parts) == 3
    assert not any("transformer_engine.pytorch" in line for line in lines)
    assert f"transformer-engine[core-cu13,pytorch]=={version}" in (ROOT / "setup.py").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "transformer-engine-torch"\nversion = "{version}"' in project
