"""docs/from_bare_node.md: every block says what tries it, that is there, and every command of ours is one."""

from __future__ import annotations

import re
import shlex

import pytest

from ctpo_megatron import cli
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "from_bare_node.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
            for line in block.splitlines() if line.startswith("ctpo ")]  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.splitlines()[0])
def test_a_section_says_what_tries_it_or_why_nothing_does(section: str) -> None:
    said = re.search(r"^(Tried by|Not tried): (.+)", section, re.MULTILINE | re.DOTALL)
    assert said is not None
    named = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(\w+))?`", said[2])
    assert named or said[1] == "Not tried"
    for file, test in named:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{file} has no {test}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_ours_parses_and_its_files_ship(command: str) -> None:
    _, *words = shlex.split(command)
    cli.parse(words)
    assert [word for word in words if word.startswith("configs/") and not (ROOT / word).is_file()] == []
