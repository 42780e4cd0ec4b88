"""The figures to steer by, counted on a small tree whose every figure is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import structure
from tests.walk import merged
from tests.walk.hook.sitecustomize import DOOR, DOORS, ROW, WEIGHTS

pytestmark = pytest.mark.slow  # of a tool that is run by hand

CORE = '''\
"""A module."""
POLL_S, NAME = 0.5, "n"
class Wide:
    RETRIES = 3
    retry_s = 3
    def _hidden(self): ...
def takes(config: "Config | None"): ...
def reinforce(config: Config, run): ...
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "ctpo_megatron/train.py": CORE,
        "ctpo_megatron/part/__init__.py": "# one\n# two\n",
        "sandbox/ctpo_sandbox/a.py": "def f(config: Config): ...\n",
        "tests/test_a.py": "x = 1\n" * 3,
        "README.md": "One two three.\n",
        "docs/a.md": "Four words | stand - here.\n",
        "docs/reference/configuration.md": "Not counted.\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_figures(tree: Path) -> None:
    assert dict(structure.figures(tree)) == {
        "core (ctpo_megatron)": "10 lines in 2 files",
        "all product packages": "11 lines in 3 files",
        "functions of the core that take the whole Config": "2",
        "constants of seconds and retries": "2",
        "tests": "3 lines in 1 files",
        "answers/tests": "0 lines in 0 files",
        "words of README": "3",
        "words of docs without the reference": "4",
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
        "row: 2 files, 9 lines",
        "  ctpo_megatron: 1 files, 8 lines",
        "        8  ctpo_megatron/train.py",
        "  sandbox/ctpo_sandbox: 1 files, 1 lines",
        "        1  sandbox/ctpo_sandbox/a.py",
    ]
    assert json.loads(structure.as_json(tree, walks))["weights"] == {
        "files": 1,
        "lines": 8,
        "entered": {"ctpo_megatron/train.py": {"lines": 8, "functions": ["takes"]}},
    }
