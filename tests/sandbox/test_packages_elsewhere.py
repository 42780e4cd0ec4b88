"""Packages outside of the interpreter's own directories, as `pip install --user` and .pth files put them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

LEVEL = "namespaces-root" if os.geteuid() == 0 else "namespaces-user"
SANDBOX = Path(__file__).parents[2] / "sandbox"


def test_a_box_without_its_packages_is_refused_and_says_where_they_belong(sandbox_server, tmp_path: Path) -> None:
    if (found := health(sandbox_server.url)["level"]) != LEVEL:
        pytest.skip(f"this machine offers {found}, not {LEVEL}")
    venv.create(tmp_path / "venv", with_pip=False)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "elsewhere.pth").write_text(f"{SANDBOX}\n{Path(numpy.__file__).parents[1]}\n")
    command = [tmp_path / "venv" / "bin" / "python", "-m", "ctpo_sandbox.server", "--port", "0", "--level", LEVEL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 1
    _, said, places = done.stderr.partition(f"{LEVEL}: No module named 'numpy': snippets see packages below ")
    places, also_said, _ = places.partition(" only, and it is installed elsewhere")
    assert said and also_said
    assert f"{tmp_path}/venv/lib" in places.split(", ")
    assert sys.prefix not in done.stderr.partition("snippets see")[2]
