"""The kernels as a distribution of their own: the README's examples run beside torch alone.

What the distribution holds: tests/test_distributions.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

KERNELS = ROOT / "kernels"
# An environment with torch alone: the project and its trainer's libraries are not to be found.
ALONE = """
import sys
for name in ("ctpo_megatron", "megatron", "triton", "vllm", "ray", "transformers"):
    sys.modules[name] = None
"""


def examples() -> str:
    """All Python of the README, one block after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (KERNELS / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    return "\n".join(blocks)


def run(*command: str, **environment: str) -> None:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=scaled(280), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_run_with_torch_alone() -> None:
    run(sys.executable, "-c", ALONE + examples(), PYTHONPATH=str(KERNELS))


@pytest.mark.slow
def test_an_empty_environment(tmp_path: Path) -> None:
    """From the package index, dependencies included."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(KERNELS), PYTHONPATH="")
    run(python, "-I", "-c", ALONE + examples())
