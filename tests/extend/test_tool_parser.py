"""examples/tool_parser: a model writes programs in a format of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.checks import check_tool_parser
from ctpo_megatron.config import Config, Extension
from tests.extend.scripted import played, project


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "adder.py").write_text(
        "from ctpo_megatron.environments.protocol import ToolResult\n"
        "from ctpo_megatron.environments.python_tool import PythonTool\n"
        "class Reader:\n"
        "    schema = PythonTool.schema\n"
        "    async def __call__(self, arguments):\n"
        "        return ToolResult(arguments['code'].upper())\n"
    )
    config = project("tool_parser")
    # What the program prints is the sandbox' business; this one gives back what it was told to run.
    rollout = config.rollout.model_copy(update={"tools": (Extension(name="adder:Reader"),)})
    return config.model_copy(update={"rollout": rollout})


def test_a_model_can_write_in_its_format(config: Config) -> None:
    check_tool_parser(config.rollout.tool_parser)
    turns = ("Both: <python>a</python> and <python>b</python>", "<python>c", "done")
    text, trajectory = played(config, *turns)
    assert text == (
        f"{turns[0]}|[user: <output>A</output>\n<output>B</output>]"
        f"{turns[1]}|[user: <output>[parse_error] write 1 to 2 programs, each with its </python></output>]done|"
    )
    assert [record.arguments for record in trajectory.tool_calls] == [{"code": "a"}, {"code": "b"}, {}]
    assert trajectory.final_text == "done"


def test_parsers_that_are_refused(config: Config) -> None:
    for name, arguments, reason in (
        ("python_tags:PythonTags", {"least": 1}, "unexpected keyword argument 'least'"),
        ("python_tags:Message", {"role": "", "content": ""}, "has no method mentions_call"),
        ("xml", {}, "write hermes or fenced, or package.module:Name"),
    ):
        with pytest.raises(ExtensionError, match=reason):
            check_tool_parser(Extension(name=name, arguments=arguments))
