"""examples/: every project is small, passes the checks of a dry run, is shown in the documents, and trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron.preflight import check_extensions
from tests.end_to_end.small_run import SMALL, records
from tests.extend.document_examples import HOWTO
from tests.extend.scripted import project, trained
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

EXAMPLES = ROOT / "examples"
CONFIGURED = ("environment", "judge", "objective", "reward", "tool")
PROJECTS = (*CONFIGURED, "agent_endpoint", "kernels", "plain_rl")
MOST_LINES = 80


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_is_small(name: str) -> None:
    files = [path for path in (EXAMPLES / name).iterdir() if path.suffix in (".py", ".yaml", ".tsv")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_LINES


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_project_passes_the_checks_of_a_dry_run(name: str) -> None:
    check_extensions(project(name))


@pytest.mark.parametrize("name", CONFIGURED)
def test_the_how_to_includes_the_files_instead_of_repeating_them(name: str) -> None:
    text = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
    included = re.findall(r"^```\{literalinclude\} \.\./\.\./examples/(\S+)$", text, re.MULTILINE)
    assert {path.partition("/")[0] for path in included} == {name}
    assert [path for path in included if not (EXAMPLES / path).is_file() or f"/examples/{path})" not in text] == []


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
@pytest.mark.parametrize("name", [name for name in CONFIGURED if name != "judge"])
def test_a_project_trains(name: str, tmp_path: Path) -> None:
    files = [EXAMPLES / name / f"{name}.yaml"]
    run, _ = trained(tmp_path, files, *SMALL, "run.steps=1", f"run.name={name}", deadline_s=280)
    assert records(run)[-1]["step"] == 1
