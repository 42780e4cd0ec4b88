"""What breaks with the newest release of each direct dependency: `make newest`.

    python -m tests.newest [NAME...] --tests FOLDER...      # of these names alone; by default of all in setup.py

In a copy of the environment (hard links, deleted afterwards) each package that has a newer release is upgraded alone.
The other direct dependencies stay, and theirs may move. Then `pip check` is compared with before, and our modules are
imported. Packages that break nothing are upgraded together, and the tests run once. A package that another direct
dependency pins exactly is only named.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("", "sandbox-math", "cpu", "tools")
MODULES = (
    "ctpo_megatron.cli",
    "ctpo_megatron.policy",
    "ctpo_megatron.rewards",
    "ctpo_megatron.report",
    "ctpo_megatron.tracking",
    "ctpo_sandbox.server",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.async_llm",
)
"""What is imported: ours, and what they import late."""
STEP_TIMEOUT_S = 900.0  # of pip, or to import all modules
TESTS_TIMEOUT_S = 1800.0
MARKED = "not slow and not gpu and not cluster and not machine and not browser and not cuda_environment"


def direct_dependencies() -> list[str]:
    """Names of setup.py and of the group `tools` that apply to this Python and are installed, in its order."""
    taken: dict[str, dict[str, list[str]]] = {}
    with mock.patch.object(setuptools, "setup", lambda **arguments: taken.update(arguments)):
        runpy.run_path(str(ROOT / "setup.py"))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    wanted = {"": taken["install_requires"], **taken["extras_require"], "tools": groups["tools"]}
    found = [Requirement(text) for extra in EXTRAS for text in wanted[extra]]
    names = [canonicalize_name(item.name) for item in found if item.marker is None or item.marker.evaluate()]
    installed = {canonicalize_name(package.name) for package in importlib.metadata.distributions()}
    return [name for name in dict.fromkeys(names) if name in installed]


def pinned_by_others(names: Sequence[str]) -> dict[str, str]:
    """Name -> which other direct dependency wants exactly the version that is there."""
    found = {}
    for owner in names:
        for text in importlib.metadata.requires(owner) or []:
            item = Requirement(text)
            exact = any(part.operator == "==" and not part.version.endswith("*") for part in item.specifier)
            if exact and (item.marker is None or item.marker.evaluate({"extra": ""})):
                found.setdefault(canonicalize_name(item.name), owner)
    return found


@dataclass(frozen=True)
class Trial:
    """A throw-away environment: a copy of this one."""

    python: Path

    def run(self, *words: str | Path, timeout: float) -> subprocess.CompletedProcess[str]:
        """`python words...`, from the checkout."""
        environment = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "MAKEFLAGS")}
        command = [self.python, *words]
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "pip", "--disable-pip-version-check", *words, timeout=STEP_TIMEOUT_S)

    def upgrade(self, wanted: Mapping[str, str], held: Sequence[str]) -> tuple[list[str], str]:
        """Install releases with what they need, while `held` stay; which names were installed, or why none."""
        report, pins = self.python.parent / "report.json", self.python.parent / "held.txt"
        pins.write_text("".join(f"{name}=={importlib.metadata.version(name)}\n" for name in held if name not in wanted))
        texts = [f"{name}=={version}" for name, version in wanted.items()]
        done = self.pip("install", "--quiet", "--report", str(report), "--constraint", str(pins), *texts)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return [], (errors or ["pip failed"])[0]
        return [canonicalize_name(item["metadata"]["name"]) for item in json.loads(report.read_text())["install"]], ""

    def restore(self, names: Sequence[str]) -> None:
        """The releases that this environment has. Raises RuntimeError."""
        former, added = [], []
        for name in names:
            try:
                former.append(f"{name}=={importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                added.append(name)
        for step, texts in ((("install", "--no-deps"), former), (("uninstall", "--yes"), added)):
            if texts and (done := self.pip(*step, "--quiet", *texts)).returncode:
                raise RuntimeError(f"pip {' '.join((*step, *texts))}: {done.stderr.strip()[-500:]}")

    def problems(self, before: set[str]) -> list[str]:
        """New refusals of `pip check`, and modules that do not import."""
        return [*sorted(self.refusals() - before), *filter(None, map(self._import_trouble, MODULES))]

    def _import_trouble(self, module: str) -> str:
        """Why a module does not import; "" if it does. In a process of its own, which a broken package may kill."""
        command = [str(self.python), "-c", f"import {module}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"{module} does not import: {reason}" if done.returncode else ""

    def refusals(self) -> set[str]:
        """What `pip check` says of versions."""
        return {line for line in self.pip("check").stdout.splitlines() if " has requirement " in line}


@contextmanager
def copied_environment() -> Iterator[Trial]:
    """This environment again, in build/: pip replaces files, and never writes into them, so links are enough."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="newest-", dir=ROOT / "build") as folder:
        copy = Path(folder) / "venv"
        shutil.copytree(sys.prefix, copy, symlinks=True, copy_function=os.link)
        yield Trial(copy / "bin" / "python")


def newest(trial: Trial, names: Sequence[str]) -> dict[str, str]:
    """Name -> the newest release that fits this Python, of those that are newer than what is there.

    Raises RuntimeError without a package index.
    """
    done = trial.pip("install", "--quiet", "--dry-run", "--no-deps", "--upgrade", "--report", "-", *names)
    if done.returncode:
        raise RuntimeError(f"pip found no newest releases: {done.stderr.strip().splitlines()[-1]}")
    items = json.loads(done.stdout)["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in items}


def outcome(trial: Trial, tests: Sequence[str]) -> str:
    """The tests that fail, and pytest's last line."""
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKED, *tests)
    done = trial.run(*words, timeout=TESTS_TIMEOUT_S)
    failed = [line for line in done.stdout.splitlines() if re.match(r"(FAILED|ERROR) ", line)]
    return "\n".join([*failed, (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tests", nargs="+", metavar="FOLDER", default=["tests/config"], help="run at the end")
    wanted = parser.parse_args(arguments)
    direct = direct_dependencies()
    names, pinned = [canonicalize_name(name) for name in wanted.names] or direct, pinned_by_others(direct)
    begun, good = time.monotonic(), {}
    with copied_environment() as trial:
        before = trial.refusals()
        found = newest(trial, names)
        print(f"{len(names) - len(found)} of {len(names)} are the newest releases already")
        for name, version in found.items():
            title = f"{name} {importlib.metadata.version(name)} -> {version}"
            if name in pinned:
                print(f"{title}: not tried, {pinned[name]} pins it")
                continue
            since = time.monotonic()
            moved, refused = trial.upgrade({name: version}, direct)
            problems = [refused] if refused else trial.problems(before)
            trial.restore(moved)
            print(f"{title}: {'breaks' if problems else 'fits'} ({time.monotonic() - since:.0f} s)", flush=True)
            print("".join(f"    {problem}\n" for problem in problems), end="")
            if not problems:
                good[name] = version
        if good:
            _, refused = trial.upgrade(good, direct)
            print(f"tests with {', '.join(good)}: {refused or outcome(trial, wanted.tests)}")
    print(f"{time.monotonic() - begun:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
