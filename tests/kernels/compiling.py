"""Processes in which Triton compiles kernels: the one that runs the tests may have been told to interpret them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ctpo_kernels import aot
from tests.support import children

PACKAGES = Path(aot.__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "PYTHONPATH": str(PACKAGES),
    "PYTHONWARNINGS": "ignore",
}


def python(*arguments: str, deadline_s: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    return children.run([sys.executable, *arguments], deadline_s=deadline_s, environment=ENVIRONMENT | environment)


def gate(*arguments: str, deadline_s: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ctpo_kernels.aot", *arguments, deadline_s=deadline_s, **environment)
