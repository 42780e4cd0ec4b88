"""The locks of requirements/: complete, hashed, within setup.py's ranges, and what the resolver would write today."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
EXTRAS = ("wandb", "tools")
LOCKS = [("cpu", "3.11"), ("cpu", "3.12"), ("cpu", "3.13"), ("cuda", "3.12")]
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)
each_lock = pytest.mark.parametrize(("device", "python"), LOCKS, ids=[f"{d}-{p}" for d, p in LOCKS])


def lock_text(device: str, python: str) -> str:
    return (FOLDER / f"{device}-{python}.txt").read_text(encoding="utf-8")


def pins(device: str, python: str) -> dict[str, str]:
    """Version by name."""
    return {name: version for name, version, _ in PIN.findall(lock_text(device, python))}


def refused(text: str, pinned: dict[str, str], python: str, extra: str = "") -> str | None:
    """Why the pins do not fulfil one requirement on x86-64 Linux; None if they do."""
    wanted = Requirement(text)
    machine = {"python_version": python, "python_full_version": f"{python}.9", "extra": extra}
    machine |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    if wanted.marker and not wanted.marker.evaluate(machine):
        return None
    version = pinned.get(canonicalize_name(wanted.name))
    return None if version and wanted.specifier.contains(version, prereleases=True) else f"{text}: locked {version}"


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What setup.py asks for, by extra, and pyproject.toml for development; "" is the package itself."""
    taken: dict[str, dict[str, list[str]]] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: taken.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return {"": list(taken["install_requires"]), **taken["extras_require"], "tools": groups["tools"]}


@each_lock
def test_a_lock_is_nothing_but_hashed_pins(device: str, python: str) -> None:
    text = lock_text(device, python)
    assert [line for line in PIN.sub("", text).splitlines() if line and not line.startswith("#")] == []
    assert [name for name, _, hashes in PIN.findall(text) if not hashes] == ["torch"] * (device == "cpu")
    assert "://" not in text


@each_lock
def test_a_lock_is_within_the_ranges_of_setup_py(device: str, python: str, declared: dict[str, list[str]]) -> None:
    texts = [text for extra in ("", *EXTRAS, device) for text in declared[extra]]
    for folder in ("answers", "kernels"):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        texts += project["dependencies"]
    assert [problem for text in texts if (problem := refused(text, pins(device, python), python))] == []


def test_the_lock_of_the_site_is_hashed_and_apart() -> None:
    """None of its tools is in a lock of the training environment."""
    text = (FOLDER / "docs.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)[^\\\n]*\\\n    --hash=sha256:", text, re.MULTILINE))
    assert len(pinned) > 20 and len(pinned) >= text.count("==") - 3  # soupsieve twice, by version of Python
    wanted = [line for line in (FOLDER / "docs.in").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert [problem for each in wanted if (problem := refused(each, pinned, "3.11"))] == []
    tools = {canonicalize_name(Requirement(each).name) for each in wanted}
    assert [lock for lock in LOCKS if tools & pins(*lock).keys()] == []


@each_lock
def test_installed_packages_accept_the_locks_that_name_them(device: str, python: str) -> None:
    """A resolver's check without a registry, for all packages that are here in the locked version."""
    pinned, problems, seen = pins(device, python), [], 0
    overridden = {re.split(r"[= ]", line)[0] for line in (FOLDER / "cpu-overrides.txt").read_text().splitlines()}
    for package in importlib.metadata.distributions():
        name = canonicalize_name(package.name)
        if pinned.get(name) != package.version:
            continue
        seen += 1
        for text in package.requires or []:
            if device == "cuda" or Requirement(text).name not in overridden:
                problem = refused(text, pinned, python)
                problems += [f"{name} wants {problem}"] if problem else []
    assert problems == []
    assert seen > 100


def run(*command: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=scaled(600), **options
    )


@pytest.fixture(scope="module")
def registry() -> None:
    """Skips where uv or packages cannot be had."""
    for command in (("make", ".venv/bin/uv"), (".venv/bin/uv", "pip", "compile", "--no-cache", "-")):
        done = run(*command, input="pyseccomp")
        if done.returncode:
            pytest.skip(f"no package registry answers: {done.stderr.strip().splitlines()[-1]}")


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_resolver_would_write_the_same_locks(registry: None, tmp_path: Path) -> None:
    """uv, platform and Python given, starting from the pins: a pin that cannot stay would differ."""
    for device, python in LOCKS:
        shutil.copy(FOLDER / f"{device}-{python}.txt", tmp_path)
    done = run("make", "locks", f"LOCKS={tmp_path}")
    assert done.returncode == 0, done.stderr
    for device, python in LOCKS:
        assert (tmp_path / f"{device}-{python}.txt").read_text() == lock_text(device, python)
