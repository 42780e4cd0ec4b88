"""docs/cluster.md: every block names the tests that try it, and every command of ours is one.

The nodes' commands run in tests/cluster.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec

import pytest

from ctpo_megatron import cli
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"(?:<!-- tested: ([^\n]+) -->\n)?(```bash\n.*?^```$|(?:^    \S[^\n]*\n)+)", re.MULTILINE | re.DOTALL
)
BLOCKS = BLOCK.findall(PAGE)
LINES = [line.strip().split("  #")[0] for _, block in BLOCKS for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("ctpo ")]
PROGRAMS = [shlex.split(line) for line in LINES if " -m ctpo_launchers.node " in line]


def test_a_block_names_the_tests_that_try_it() -> None:
    assert len(BLOCKS) >= 4
    for named, block in BLOCKS:
        assert named, block
        assert [file for file in named.split(", ") if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_ours_parses(command: str) -> None:
    cli.parse(shlex.split(command)[1:])


def test_the_cluster_file_ships() -> None:
    copied = [shlex.split(line)[1:] for line in LINES if line.startswith("cp ")]
    assert copied and all((ROOT / source).is_file() and target == "my_cluster.yaml" for source, target in copied)


@pytest.mark.parametrize("words", PROGRAMS, ids=lambda words: words[0])
def test_a_node_program_trains_the_configuration(words: list[str]) -> None:
    module, *options = words[words.index("-m") + 1 :]
    assert find_spec(module) is not None
    cli.parse(["train", *options[options.index("--") + 1 :]])
