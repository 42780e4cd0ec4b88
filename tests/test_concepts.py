"""docs/concepts.md: each of the twelve classes has its section, and has the members that the section names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_links import ROOT

PAGE = ROOT / "docs" / "concepts.md"
CONCEPTS = (
    "Prompt",
    "Trajectory",
    "Batch",
    "Environment",
    "Tool",
    "Reward",
    "Objective",
    "Trainer",
    "EnginePool",
    "GroupSampler",
    "Rollouts",
    "Run",
)
MODULE = re.compile(r"\A`([\w/]+\.py)`\. ")
MEMBERS = re.compile(r"^(?:Members|Fields)\b[^:]*: (.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`(\w+)(?:\(.*?\))?`")


def sections(text: str) -> dict[str, str]:
    """Heading of the third level -> what follows it, up to the next heading."""
    text = text.partition("\n## Twelve classes\n")[2].partition("\n## ")[0]
    parts = re.split(r"^### (.+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def listed_members(section: str) -> list[str]:
    """The names in the paragraph of members."""
    (members,) = MEMBERS.findall(section)
    return NAME.findall(members)


def defined_members(module: Path, name: str) -> set[str]:
    """Methods, properties and attributes of a class, those that are assigned in its methods included."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    assert len(classes) == 1, f"{module.relative_to(ROOT)} defines no class {name}"
    members: set[str] = set()
    for node in ast.walk(classes[0]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            members.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            members.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            members.add(node.attr)
    return members


def test_the_page_has_the_twelve_and_no_other() -> None:
    assert tuple(sections(PAGE.read_text(encoding="utf-8"))) == CONCEPTS


@pytest.mark.parametrize("name", CONCEPTS)
def test_a_concept_is_defined_where_the_page_says(name: str) -> None:
    section = sections(PAGE.read_text(encoding="utf-8"))[name]
    (module,) = MODULE.findall(section)
    file = ROOT / "ctpo_megatron" / module
    assert file.is_file(), f"{module} does not exist"
    listed = listed_members(section)
    assert listed, "no member is listed"
    assert set(listed) - defined_members(file, name) == set()


def test_the_loop_is_the_one_of_the_code() -> None:
    (shown,) = re.findall(r"The whole loop:\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    tree = ast.parse((ROOT / "ctpo_megatron" / "train.py").read_text(encoding="utf-8"))
    (loop,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "reinforce"]
    assert ast.unparse(ast.parse(shown)) == "\n".join(map(ast.unparse, loop.body[1:]))
