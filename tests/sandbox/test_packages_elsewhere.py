"""Packages outside of the interpreter's own directories, as PYTHONPATH and .pth files put them."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy
import pytest

from tests.sandbox.conftest import SANDBOX, announced
from tests.sandbox.sandbox_http import HTTP, health
from tests.support.deadlines import scaled

LEVEL = "namespaces-root" if os.geteuid() == 0 else "namespaces-user"


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


def test_the_servers_own_packages_may_lie_anywhere(sandbox_server, tmp_path: Path) -> None:
    """Also what compiles its filters of system calls: snippets need none of them."""
    if (offered := health(sandbox_server.url)["level"]) != LEVEL:
        pytest.skip(f"this machine offers {offered}, not {LEVEL}")
    venv.create(tmp_path / "venv", with_pip=False)
    path = os.pathsep.join([str(SANDBOX), str(Path(numpy.__file__).parents[1])])
    python, announce = tmp_path / "venv" / "bin" / "python", tmp_path / "url"
    options = ["--port", "0", "--level", LEVEL, "--tiers", "stdlib", "--announce", str(announce)]
    command = [python, "-m", "ctpo_sandbox.server", *options]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    try:
        url = announced(announce, server)
        assert health(url)["level"] == LEVEL
        said = HTTP.post(f"{url}/faas/sandbox/", json={"code": "import pyseccomp"}).text
        assert "No module named 'pyseccomp'" in said
    finally:
        server.terminate()
        server.wait(scaled(30))
