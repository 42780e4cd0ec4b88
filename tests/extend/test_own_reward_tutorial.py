"""docs/tutorials/own_reward.md: typed as the page shows it, from an empty folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo, records
from tests.support import children
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "own_reward.md").read_text(encoding="utf-8")
FILES = re.findall(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    ((?:ctpo|python) .*)$", PAGE, re.MULTILINE)


def type_in(command: str, folder: Path) -> str:
    """The output of a line of the page, in a shell with `ctpo` and `python` on its path."""
    programs = folder.parent / "programs"
    programs.mkdir(exist_ok=True)
    for name, words in {"python": "", "ctpo": "-m ctpo_megatron.cli"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = Ctpo(folder).environment
    environment |= {"PATH": f"{programs}:{environment['PATH']}"}
    done = children.run(["sh", "-c", command], directory=folder, environment=environment, deadline_s=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new folder with the files of the page and nothing else."""
    made = tmp_path / "own_reward"
    made.mkdir()
    for name, text in FILES:
        (made / name).write_text(text, encoding="utf-8")
    return made


def test_the_page_has_a_function_a_configuration_and_four_commands() -> None:
    assert [name for name, _ in FILES] == ["brevity.py", "own_reward.yaml"]
    assert [" ".join(command.split()[:2]) for command in COMMANDS] == ["python -m", *["ctpo train"] * 2, "python -c"]


def test_a_misspelled_argument_is_named(folder: Path) -> None:
    settings = folder / "own_reward.yaml"
    settings.write_text(settings.read_text().replace("budget", "bugdet"))
    with pytest.raises(AssertionError, match=r"reward\.function"):
        type_in(COMMANDS[1], folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_page_shows_is_what_happens(folder: Path) -> None:
    task, check, train, read = COMMANDS
    for command in (task, check, train):
        type_in(command, folder)
    steps = records(folder / "runs" / "own_reward")
    paid, boxed = ([step[f"reward/{name}"] for step in steps if step["step"]] for name in ("mean", "boxed"))
    assert len(paid) == 6 and sum(paid[3:]) / 3 > paid[0] + 0.1
    assert max(boxed[3:]) > boxed[0]
    assert re.fullmatch(r"\[\('boxed', [01]\.0\), \('short', 0\.\d+\)\]\n", type_in(read, folder))
