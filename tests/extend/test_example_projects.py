"""examples/: every project is small, passes the checks of a dry run, is shown in the documents, and trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.checks import check_extensions
from tests.end_to_end.small_run import SMALL, records
from tests.extend.document_examples import DOCS, EXTENDING
from tests.extend.scripted import project, trained
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

EXAMPLES = ROOT / "examples"
CONFIGURED = (
    "brevity",
    "environment",
    "filter",
    "judge",
    "objective",
    "reward",
    "sampler",
    "tool",
    "tool_parser",
    "tracker",
)
PROJECTS = (*CONFIGURED, "agent_endpoint", "kernels", "model_family", "plain_rl")
TRAINED = ("environment", "objective", "reward", "tool")
MOST_LINES = 80


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_is_small(name: str) -> None:
    files = [path for path in (EXAMPLES / name).iterdir() if path.suffix in (".py", ".yaml", ".tsv")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_LINES


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_project_passes_the_checks_of_a_dry_run(name: str) -> None:
    check_extensions(project(name))


@pytest.mark.parametrize("page", [EXTENDING, DOCS / "agents.md"], ids=lambda page: page.stem)
def test_a_page_includes_files_that_are_there_and_links_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    included = re.findall(r"^```\{literalinclude\} \.\./examples/(\S+)$", text, re.MULTILINE)
    linked = set(re.findall(r"\]\(\.\./examples/(\w+)/", text))
    assert included and {path.partition("/")[0] for path in included} <= linked
    assert [path for path in included if not (EXAMPLES / path).is_file()] == []


def test_the_page_of_extensions_shows_every_kind() -> None:
    text = EXTENDING.read_text(encoding="utf-8")
    assert [name for name in (*CONFIGURED, "model_family") if f"(../examples/{name}/" not in text] == []


def test_every_project_is_in_the_list() -> None:
    listed = re.findall(r"^\| \[\w+\]\((\w+)/", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if any(path.glob("*.py")))


@pytest.mark.slow
def test_the_loop_with_the_kernels_alone_learns() -> None:
    """In an interpreter that can import nothing else of ours."""
    program = f"import runpy; print(runpy.run_path({str(EXAMPLES / 'kernels' / 'plain_loop.py')!r})['main']())"
    environment = {"PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=scaled(250)
    )
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"[\d.]+", done.stdout.splitlines()[-1]))
    assert first < 0.3 and last > 0.8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TRAINED)
def test_a_project_trains(name: str, tmp_path: Path) -> None:
    files = [EXAMPLES / name / f"{name}.yaml"]
    run, _ = trained(tmp_path, files, *SMALL, "run.steps=1", f"run.name={name}", deadline_s=280)
    assert records(run)[-1]["step"] == 1
