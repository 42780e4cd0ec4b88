"""Which interpreter `make` builds its environment with: requirements/python.sh, and the Makefile that asks it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.11", "3.12", "3.13")


def interpreter(file: Path, version: str | None) -> None:
    """A stand-in that reports a version; None: one that fails, as pyenv's commands of other versions and a Debian
    Python without venv do."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho {version}\n" if version else "#!/bin/sh\nexit 127\n")
    file.chmod(0o755)


def choose(folder: Path, versions: tuple[str, ...] = VERSIONS) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}/bin", "HOME": f"{folder}/home"}
    command = ["/bin/sh", ROOT / "requirements" / "python.sh", *versions]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"bin/python3": "3.12", "bin/python3.11": "3.11"}, "bin/python3"),
        ({"bin/python3": "3.13"}, "bin/python3"),  # Debian 13
        ({"bin/python3": "3.14", "bin/python3.13": "3.13", "bin/python3.12": "3.12"}, "bin/python3.12"),
        ({"bin/python3": None, "bin/python3.11": None, "bin/python3.13": "3.13"}, "bin/python3.13"),
        (
            {"bin/python3": "3.9", "home/.pyenv/versions/3.13.0/bin/python": "3.13"},
            "home/.pyenv/versions/3.13.0/bin/python",
        ),
        (
            {"home/.pyenv/versions/3.1.9/bin/python": "3.1", "home/.pyenv/versions/3.12.1/bin/python": "3.12"},
            "home/.pyenv/versions/3.12.1/bin/python",
        ),
    ],
    ids=["system", "only 3.13", "system too new", "without venv", "pyenv", "pyenv, not a prefix"],
)
def test_the_first_fitting_python_is_taken(there: dict[str, str | None], chosen: str, tmp_path: Path) -> None:
    for name, version in there.items():
        interpreter(tmp_path / name, version)
    done = choose(tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / chosen)), done.stderr


def test_without_one_the_error_says_what_would_do(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / "python3", "3.14")
    done = choose(tmp_path)
    assert done.returncode != 0 and done.stdout == ""
    for part in ("3.11 3.12 3.13", "python3-venv", "make PYTHON="):
        assert part in done.stderr


def run_make(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    command = ["make", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(60), check=False
    )


def make(*arguments: str) -> str:
    """What `make` would do in a checkout without an environment: nothing is run."""
    done = run_make("--dry-run", "VENV=nowhere", *arguments, "nowhere/bin/python")
    return done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_make_takes_the_python_that_it_is_given_and_says_so(version: str, tmp_path: Path) -> None:
    interpreter(tmp_path / "mine", version)
    said = make(f"PYTHON={tmp_path / 'mine'}")
    assert f"Python {version} for nowhere: {tmp_path / 'mine'}" in said
    assert f"{tmp_path / 'mine'} -m venv nowhere" in said


def test_an_environment_of_another_tool_is_left_as_it_is(tmp_path: Path) -> None:
    interpreter(tmp_path / "theirs" / "bin" / "python", "3.11")
    done = run_make(f"VENV={tmp_path / 'theirs'}", "lint")
    assert done.returncode != 0 and "theirs was not made by make" in done.stderr
    for way in ("uv run ctpo", "move it away", "make VENV="):
        assert way in done.stderr
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["bin"]


def test_help_has_the_targets_of_every_day_and_help_all_has_every_target() -> None:
    texts = (run_make(target).stdout for target in ("help", "help-all"))
    every_day, every = (set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE)) for text in texts)
    nine = "quickstart test test-slow test-gpu test-cluster lint docs locks bench"
    assert every_day - {"help-all"} == set(nine.split())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert every == set(targets.split()) - {"help", "help-all", "clean"}


def test_the_lock_for_gpus_is_for_one_version(tmp_path: Path) -> None:
    interpreter(tmp_path / "mine", "3.13")
    done = run_make("test-cuda-environment", f"CUDA_PYTHON={tmp_path / 'mine'}")
    assert done.returncode != 0 and "is Python 3.13; the lock for GPUs is for 3.12" in done.stderr


def test_every_version_has_its_locks() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"PYTHONS := {' '.join(VERSIONS)}\n" in makefile
    locks = ["cuda-3.12.txt", *(f"cpu-{version}.txt" for version in VERSIONS)]
    assert [lock for lock in locks if not (ROOT / "requirements" / lock).is_file()] == []
