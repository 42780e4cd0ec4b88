"""Processes in which Triton compiles kernels: the one that runs the tests may have been told to interpret them."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.kernels import aot
from tests.support import children
from tests.support.prefork import Prefork

ROOT = Path(__file__).parents[2]
PACKAGES = f"{ROOT}:{ROOT / 'kernels'}"
"""The folders of `benchmarks` and `ctpo_kernels`, as in PYTHONPATH."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
    "PYTHONPATH": PACKAGES,
    "PYTHONWARNINGS": "ignore",
}


@cache
def _server() -> Prefork:
    """Of processes that have imported Triton as it compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        server = Prefork(("benchmarks.kernels.aot",))
    atexit.register(server.close)
    return server


def code(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -c text arguments` in a new process, after `import benchmarks.kernels.aot`."""
    return _server().run(exec, text, {}, argv=["-c", *arguments], environment=ENVIRONMENT, deadline_s=280)


def quick_gate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`gate --quick` likewise, compiling in one process."""
    given = ["--quick", "--processes", "1", *arguments]
    return _server().run(aot.main, given, environment=ENVIRONMENT | environment, deadline_s=280)


def gate(**environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m benchmarks.kernels.aot`, with as many processes as it takes."""
    command = [sys.executable, "-m", "benchmarks.kernels.aot"]
    return children.run(command, deadline_s=280, environment=ENVIRONMENT | environment)
