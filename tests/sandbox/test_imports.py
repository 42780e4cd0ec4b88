"""What importing the sandbox costs: a login node has none of its libraries."""

from __future__ import annotations

import subprocess
import sys

import ctpo_sandbox
from tests.support.deadlines import scaled

LIBRARIES = ("aiohttp", "httpx", "fastapi", "uvicorn", "pyseccomp", "prometheus_client")


def test_the_package_itself_needs_no_library() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None; " for name in LIBRARIES)
    program = f"import sys; {absent}import ctpo_sandbox, ctpo_sandbox.arguments, ctpo_sandbox.records"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr


def test_every_name_that_it_exports_is_there() -> None:
    assert [name for name in ctpo_sandbox.__all__ if not hasattr(ctpo_sandbox, name)] == []
