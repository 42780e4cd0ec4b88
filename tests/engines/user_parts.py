"""Parts that a user could have written, loaded by their import path in engine processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.environments import (
    Episode,
    Message,
    ParseError,
    PythonTool,
    ToolCallRequest,
    ToolEnvironment,
    ToolResult,
    ToolUnavailable,
)


class OwnError(Exception):
    """Cannot be loaded from what pickle keeps of it, and shows itself by code."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)

    def __repr__(self) -> str:
        raise KeyboardInterrupt


class ScriptedPython:
    """Stands in for the sandbox: prints 1, until the file `flag` says otherwise.

    A number: unavailable that many times. "bug", "own error": raises what no tool should raise. "hang":
    no answer while it says so, and a file "called" beside the flag.
    """

    schema = PythonTool.schema

    def __init__(self, flag: str) -> None:
        self._flag = Path(flag)

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        while (text := self._flag.read_text() if self._flag.exists() else "0") == "hang":
            self._flag.with_name("called").touch()
            await asyncio.sleep(0.1)
        if text == "own error":
            raise OwnError("\ud800\x1b[2J", 7)
        if text == "bug":
            raise KeyError("a bug in a user's tool")
        if (left := int(text)) > 0:
            self._flag.write_text(str(left - 1))
            raise ToolUnavailable("connection refused")
        return ToolResult("1")


class Adder:
    """A second tool."""

    schema = {  # noqa: RUF012 - as a user would write it
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(str(arguments["a"] + arguments["b"]))


class TaggedParser:
    """Reads what the tiny model says as Hermes calls as if it were a format of its own; answers come from the user.

    A turn ends behind its first call; it pauses behind some letters, too, and goes on.
    """

    stop = ("</tool_call>", "e", "a", "o")

    def __init__(self, tag: str) -> None:
        self._tag = tag

    def mentions_call(self, text: str) -> bool:
        return "<tool_call>" in text

    def ends_turn(self, text: str) -> bool:
        return text.endswith("</tool_call>")

    def parse(self, text: str) -> list[ToolCallRequest]:
        if text.count("<tool_call>") > 1:
            raise ParseError("one call, please")
        call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
        return [
            ToolCallRequest(call["name"], call["arguments"]),
            ToolCallRequest("add", {"a": len(call["arguments"]["code"]), "b": 1}),
        ]

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        return [Message("user", "".join(f"<{self._tag}>{call.output}</{self._tag}>" for call in calls))]


class Either:
    """Asks again until the model has spoken `times` times if a prompt is of "user turns", else lets it use tools."""

    def __init__(self, times: int) -> None:
        self._times, self._tools = times, ToolEnvironment()

    async def run(self, episode: Episode) -> None:
        if episode.prompt.data_source != "user turns":
            return await self._tools.run(episode)
        turn = await episode.generate()
        while turn.number < self._times:
            episode.reply(Message("user", f"{turn.number}: {episode.prompt.extra['again']}"))
            turn = await episode.generate()
        episode.finish(turn.text)
