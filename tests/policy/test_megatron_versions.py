"""Both releases of megatron-core: a run that began under one continues under the other, from the same state."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from ctpo_megatron.policy import Layout
from tests.policy import megatron_checkpoints as checkpoints
from tests.policy.megatron_checkpoints import VERSION
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ("0.16.1", "0.19.2")


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Within rounding: moments or counters that were lost change the step by most of itself.

    Gradients in bfloat16 are rounded by up to 2**-8, depending on the CPU's vectors, and the step with them. Where a
    gradient nearly cancels, its rounding is a larger part of it.
    """
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if tensor.dtype is torch.bfloat16:
            of_the_weight = 2**-7 * expected[name].float().abs()
            beyond = ((tensor.float() - expected[name].float()).abs() - of_the_weight).clamp(min=0)
            assert beyond.square().mean().sqrt() <= 2**-8 * checkpoints.LR, name
            assert beyond.max() <= checkpoints.LR / 10, name
        else:
            torch.testing.assert_close(
                tensor, expected[name], rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("kind", checkpoints.KINDS)
@pytest.mark.parametrize("release", RELEASES)
def test_a_checkpoint_of_either_release_is_continued(layout: Layout, tmp_path: Path, release: str, kind: str) -> None:
    assert_same(*checkpoints.resume(layout, checkpoints.FOLDER / f"{release}-{kind}.zip", tmp_path))


def test_the_installed_release_is_one_of_the_two() -> None:
    assert VERSION in RELEASES


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_the_other_environment_is_continued(layout: Layout, tmp_path: Path) -> None:
    """CTPO_OTHER_PYTHON: a Python whose environment has the other release and this checkout."""
    other = os.environ.get("CTPO_OTHER_PYTHON")
    if not other:
        pytest.skip("CTPO_OTHER_PYTHON does not name a Python with the other release of megatron-core")
    command = [other, "-m", "tests.policy.megatron_checkpoints", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(800), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    archives = sorted(tmp_path.glob("*.zip"))
    assert len(archives) == len(checkpoints.KINDS)
    assert not any(archive.name.startswith(VERSION) for archive in archives), "the same release"
    for archive in archives:
        assert_same(*checkpoints.resume(layout, archive, tmp_path / archive.stem))
