"""docs/from_bare_node.md: every block says what tries it, that is there, and every command of ours is one.

So is every command of docs/tutorials/slurm.md.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

from ctpo_megatron import cli
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "from_bare_node.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
TUTORIAL = (ROOT / "docs" / "tutorials" / "slurm.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```bash\n(.*?)^```$", PAGE + TUTORIAL, re.MULTILINE | re.DOTALL)
         for line in block.splitlines()]  # fmt: skip
COMMANDS = list(dict.fromkeys(line for line in LINES if line.startswith("ctpo ")))


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


def test_the_tutorial_trains_by_torchrun_and_copies_a_file_that_ships() -> None:
    copied = [shlex.split(line) for line in LINES if line.startswith("cp ")]
    assert copied and all((ROOT / source).is_file() and target == "my_cluster.yaml" for _, source, target in copied)
    (torchrun,) = [shlex.split(line) for line in LINES if line.startswith("torchrun ")]
    module, *words = torchrun[torchrun.index("-m") + 1 :]
    assert find_spec(module) is not None
    cli.parse(["train", *words])
