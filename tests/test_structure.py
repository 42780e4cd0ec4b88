"""The figures to steer by, counted on a small tree whose every figure is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import structure
from tests.walk import merged
from tests.walk.hook.sitecustomize import DOOR, DOORS, ROW, WEIGHTS

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


def test_figures(tree: Path) -> None:
    assert dict(structure.figures(tree)) == {
        "core (ctpo_megatron)": "22 lines in 2 files",
        "all product packages": "23 lines in 3 files",
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


def record(folder: Path, process: int, entries: list[tuple[str, str, str]]) -> None:
    (folder / f"{process}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def test_processes_are_merged(tree: Path) -> None:
    folder = tree / "walk"
    folder.mkdir()
    train, tool = str(tree / "ctpo_megatron/train.py"), str(tree / "sandbox/ctpo_sandbox/a.py")
    doors = [(DOOR, "", name) for name in DOORS]
    record(folder, 1, [*doors[:-1], (ROW, train, "reinforce"), (WEIGHTS, train, "takes")])
    record(folder, 2, [doors[-1], (ROW, train, "reinforce"), (ROW, train, "Wide._hidden"), (ROW, tool, "f")])
    walks = merged(folder, tree)
    assert walks == {
        "row": {"ctpo_megatron/train.py": ["Wide._hidden", "reinforce"], "sandbox/ctpo_sandbox/a.py": ["f"]},
        "weights": {"ctpo_megatron/train.py": ["takes"]},
    }
    assert structure.listing(tree, "row", walks["row"]) == [
        "row: 2 files, 19 lines",
        "  ctpo_megatron: 1 files, 18 lines",
        "       18  ctpo_megatron/train.py",
        "  sandbox/ctpo_sandbox: 1 files, 1 lines",
        "        1  sandbox/ctpo_sandbox/a.py",
    ]
    assert json.loads(structure.as_json(tree, walks))["weights"] == {
        "files": 1,
        "lines": 18,
        "entered": {"ctpo_megatron/train.py": {"lines": 18, "functions": ["takes"]}},
    }
