"""The figures to steer by, counted on a small tree whose every figure is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import structure

CORE = '''\
"""A module."""
# why
from typing import Protocol
POLL_S, NAME = 0.5, "n"
class Loud(Protocol):
    def shout(self) -> str: ...
class BadThing(ValueError):
    retry_s = 3
class WorseThing(BadThing):
    RETRIES = 3  # times
class Wide:
    def __init__(self, a, b, c, d, e, f, g): ...
    def _hidden(self): ...
def takes(config: "Config | None"): ...
def reinforce(config: Config, run):
    for step in run.steps():
        run.publish(step)
    return [a for a in b for b in c], {x for x in y}
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "ctpo_megatron/train.py": CORE,
        "ctpo_megatron/part/__init__.py": "# one\n# two\nclass Wide: ...\n\n",
        "sandbox/ctpo_sandbox/a.py": "def f(config: Config): ...\n",
        "tests/test_a.py": "x = 1\n" * 3,
        "README.md": "One two three.\n",
        "docs/a.md": "Four words | stand - here.\n\n" + "Word " * 31 + "end.\n",
        "docs/reference/configuration.md": "Not counted.\n",
        "docs/reference/metrics.md": "Sentences are counted.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "WALKS", {"here": "train.py part/gone.py"})
    rows, missing = structure.figures(tree)
    assert missing == ["here: part/gone.py"]
    assert dict(rows) == {
        "core (ctpo_megatron)": "22 lines in 2 files",
        "all product packages": "23 lines in 3 files",
        "walk here": "18 lines in 1 files",
        "Protocols": "1",
        "exception classes": "2",
        "public names": "9 (core 8)",
        "functions of the core that take the whole Config": "2",
        "class names defined twice": "1: Wide",
        "constants of seconds and retries": "2",
        "names in reinforce() of train.py": "10",
        "constructors of more than 6 arguments": "1: Wide",
        "comprehensions per 1,000 lines of the core": "90.9; 1 with more than one `for`",
        "comments per 100 lines of the core": "18.2",
        "  ctpo_megatron/part": "50.0",
        "  sandbox/ctpo_sandbox": "0.0",
        "tests": "3 lines in 1 files",
        "answers/tests": "0 lines in 0 files",
        "words of README": "3",
        "words of docs without the reference": "36",
        "sentences of documents over 30 words": "1 of 4",
    }


def test_the_command_names_what_is_not_there(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "WALKS", {"here": "train.py"})
    assert structure.main([str(tree)]) == 0
    monkeypatch.setattr(structure, "WALKS", {"here": "part/gone.py"})
    assert structure.main([str(tree)]) == 1
    assert capsys.readouterr().out.endswith("not there, edit WALKS of tests/structure.py: here: part/gone.py\n")
