"""examples/brevity: the commands of docs/extending.md, typed in a folder with the examples and nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo, records
from tests.extend.document_examples import EXTENDING
from tests.support import children
from tests.support.prefork import ROOT

SECTION = re.search(r"^## Reward\n(.*?)^## ", EXTENDING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    ((?:ctpo|python) .*)$", SECTION[1] if SECTION else "", re.MULTILINE)


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
    """A new folder with what the commands name."""
    made = tmp_path / "checkout"
    made.mkdir()
    for shipped in ("configs", "examples"):
        (made / shipped).symlink_to(ROOT / shipped)
    return made


def test_the_page_has_four_commands() -> None:
    assert [" ".join(command.split()[:2]) for command in COMMANDS] == ["python -m", *["ctpo train"] * 2, "python -c"]


def test_a_misspelled_argument_is_named(folder: Path) -> None:
    misspelled = "'reward.function={name: brevity:score, arguments: {bugdet: 176}}'"
    with pytest.raises(AssertionError, match=r"reward\.function.*bugdet"):
        type_in(f"{COMMANDS[1]} {misspelled}", folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_page_shows_is_what_happens(folder: Path) -> None:
    task, check, train, read = COMMANDS
    for command in (task, check, train):
        type_in(command, folder)
    steps = records(folder / "runs" / "brevity")
    paid, boxed = ([step[f"reward/{name}"] for step in steps if step["step"]] for name in ("mean", "boxed"))
    assert len(paid) == 6 and sum(paid[3:]) / 3 > paid[0] + 0.1
    assert max(boxed[3:]) > boxed[0]
    assert re.fullmatch(r"\[\('boxed', [01]\.0\), \('short', 0\.\d+\)\]\n", type_in(read, folder))
