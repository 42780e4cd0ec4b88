"""examples/tool: a model calls it, and what is refused before anything starts."""

from __future__ import annotations

import json

import pytest

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.checks import check_tool
from ctpo_megatron.config import Config, Extension
from ctpo_megatron.environments import tool_schemas
from tests.extend.scripted import played, project


@pytest.fixture
def config() -> Config:
    return project("tool")


def call(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'dictionary', 'arguments': arguments})}</tool_call>"


def test_a_model_can_call_it(config: Config) -> None:
    for tool in config.rollout.tools:
        check_tool(tool)
    assert [schema["function"]["name"] for schema in tool_schemas(config.rollout)] == ["code_interpreter", "dictionary"]
    turns = (call(word="ring") + call(word="rang"), call(word=1), "done")
    text, trajectory = played(config, *turns)
    assert text == (
        f"{turns[0]}|[tool: a round thing][tool: no such word]"
        f'{turns[1]}|[tool: [parse_error] "word" must be a string, found int]done|'
    )
    assert [(record.name, record.status) for record in trajectory.tool_calls] == [
        ("dictionary", "success"),
        ("dictionary", "runtime_error"),
        ("", "parse_error"),
    ]
    assert trajectory.final_text == "done"


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("dictionary:Dictionary", {}, "missing a required argument: 'file'"),
        ("dictionary:Dictionary", {"file": "x", "size": 1}, "unexpected keyword argument 'size'"),
        ("dictionary:Missing", {}, "has no 'Missing'"),
        ("dictionary:ToolResult", {}, "needs the class attribute `schema`"),
        ("pyton", {}, "write python, or package.module:Name"),
        ("python", {"slots": 1}, "its settings are in the section `sandbox`"),
    ],
)
def test_tools_that_are_refused(config: Config, name: str, arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(ExtensionError, match=reason):
        check_tool(Extension(name=name, arguments=arguments))
