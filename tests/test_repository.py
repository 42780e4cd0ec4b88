"""What a user of the repository relies on besides code: one version, the licence, the checks."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import ctpo_answers
import ctpo_kernels
import ctpo_megatron
from tests.mutations.__main__ import load as mutations
from tests.support.lanes import WAITING

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = (
    "ctpo_megatron",
    "answers/ctpo_answers",
    "kernels/ctpo_kernels",
    "sandbox/ctpo_sandbox",
    "launchers/ctpo_launchers",
)


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    packages = {package.__version__ for package in (ctpo_megatron, ctpo_answers, ctpo_kernels)}
    assert packages == {citation["version"]} == {versions[0]}


def test_the_licence_is_complete_and_named() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["license"] == "Apache-2.0"
    assert '\nlicense = "Apache-2.0"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", SHIPPED)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_a_commit_is_checked_like_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--assume-old=.venv/.installed", "lint"],  # also under make
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [hook["entry"] for hook in hooks] == done.stdout.strip().splitlines()


def test_every_planted_bug_still_has_its_place() -> None:
    """`make mutation` is not run here; a text that has moved would only be noticed there."""
    assert len(mutations()) >= 40


def test_every_planted_bug_is_a_program(tmp_path: Path) -> None:
    """A name that is not there fails for another reason than the bug, or makes the code give up before it."""
    for mutation in mutations():
        if mutation.file.endswith(".py"):
            text = (ROOT / mutation.file).read_text(encoding="utf-8").replace(mutation.old, mutation.new)
            (tmp_path / f"{mutation.id}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def files_of_tests() -> list[Path]:
    return [path for folder in ("tests", "answers/tests") for path in (ROOT / folder).rglob("*.py")]


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages pytest imports them by name alone, and files of two folders in one process clash."""
    names = [path.name for path in files_of_tests() if path.name.startswith("test_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_the_files_whose_tests_wait_exist() -> None:
    assert [name for name in WAITING if not [*(ROOT / "tests").glob(f"{name}*")]] == []


def test_no_file_of_tests_hides_a_library() -> None:
    """pytest puts folders of tests before installed libraries in `sys.path`."""
    libraries = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    names = {path.stem: path for path in files_of_tests() if path.stem not in ("__init__", "conftest")}
    assert [str(names[name]) for name in sorted(names.keys() & libraries)] == []


def test_hosted_checks_are_those_of_the_makefile_on_every_python() -> None:
    """Their commands are `make` targets that exist, and the matrix is the list of locks."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8"))["jobs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert targets == ["lint", "test", "docs"]
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    pythons = re.search(r"^PYTHONS := (.*)$", makefile, re.MULTILINE)
    assert pythons and jobs["test"]["strategy"]["matrix"]["python"] == pythons[1].split()
    assert all("timeout-minutes" in job for job in jobs.values())


def test_actions_are_pinned_by_their_commit() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        uses = re.findall(r"uses: (.*)", file.read_text(encoding="utf-8"))
        assert [each for each in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", each)] == [], file.name


def test_the_local_checks_are_among_the_hosted_ones() -> None:
    hosted = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    local = re.findall(r"make (\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert local == ["lint", "test"]
    assert all(f"make {target}" in hosted for target in local)


def test_a_release_has_at_most_two_screens_in_the_changelog() -> None:
    """45 lines of 120 characters a screen."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert sum(1 + len(line) // 120 for line in section.splitlines()) <= 90, section.splitlines()[0]


def test_templates_are_read_by_the_host() -> None:
    for form in ("bug", "wish"):
        template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= template.keys()
        assert all(part["type"] in ("markdown", "textarea") for part in template["body"])
