"""The tools of a run and their parser: from the text of a model turn to tool calls and messages with their results."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from ctpo_megatron.base.extensions import ExtensionError, called
from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.environments.protocol import (
    Message,
    ParseError,
    Schema,
    StoppingParser,
    Tool,
    ToolCallRequest,
    ToolParser,
    ToolResult,
    ToolUnavailable,
)

_PARSER = "rollout.tool_parser"
_STATUSES = ("success", "timeout", "runtime_error")
_A = {
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "boolean": "a boolean",
    "array": "an array",
    "object": "an object",
}


def cut_middle(text: str, max_chars: int) -> str:
    """`text` cut to `max_chars` of its characters: head and tail, with a note of how many were cut between them."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars} characters cut ...]\n{text[len(text) - tail :]}"


def example_call(parser: ToolParser) -> tuple[str, ToolCall]:
    """Return a turn that calls a tool, and the record of the call; without an `example` of the parser the turn is plain
    text.

    Raises ExtensionError where the parser finds no call in its example.
    """
    said = str(getattr(parser, "example", "I call a tool."))
    try:
        requests = parser.parse(said) if hasattr(parser, "example") else [ToolCallRequest("", {})]
    except ParseError:
        requests = []
    if not requests:
        raise ExtensionError(f"{type(parser).__name__}.parse finds no call in {said!r}, its own example")
    request = requests[0]
    return said, ToolCall(1, request.name, request.arguments, "success", "42", 0.0)


class Toolbox:
    """All tools of a run. Without tools no turn is a tool call.

    max_chars: characters of an answer that the model is shown, not counting the note of a cut.
    """

    def __init__(self, tools: Sequence[Tool], parser: ToolParser, max_chars: int) -> None:
        self._tools = {_name(tool): tool for tool in tools}
        if len(self._tools) != len(tools):
            raise ValueError(f"two of the tools {', '.join(map(_name, tools))} have one name")
        self._parser, self._max_chars = parser, max_chars

    @property
    def schemas(self) -> list[Schema]:
        """The schema of every tool, in the order of the configuration."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def stop(self) -> Sequence[str]:
        """Strings after which sampling pauses, because the turn may be over."""
        return self._parser.stop if self._tools and isinstance(self._parser, StoppingParser) else ()

    def ends_turn(self, text: str) -> bool:
        """Return whether a turn without an end token is over because it contains a complete call."""
        with called(_PARSER):
            return bool(self._tools) and isinstance(self._parser, StoppingParser) and self._parser.ends_turn(text)

    def mentions_call(self, text: str) -> bool:
        """Return whether a model turn must be read as tool calls, well-formed or not."""
        with called(_PARSER):
            return bool(self._tools) and self._parser.mentions_call(text)

    def read(self, text: str) -> tuple[str, list[ToolCallRequest]]:
        """Return what a turn says besides its calls, and the calls; with or without tools of the run. Raises
        ParseError.
        """
        with called(_PARSER):
            if not self._parser.mentions_call(text):
                return text, []
            requests = self._parser.parse(text)
            for request in requests:
                if not isinstance(request.name, str) or not isinstance(request.arguments, dict):
                    raise ParseError("the name of a call must be a text, and its arguments an object")
                _check_encodable([request.name, request.arguments], "a call")
            said = getattr(self._parser, "said", None)
            return "" if said is None else str(said(text)), requests

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return the messages that show the outputs of `calls` to the model. Raises ExtensionError where there are
        none.
        """
        with called(_PARSER):
            messages = self._parser.render(calls)
        if not messages or not all(isinstance(message, Message) for message in messages):
            by = f"{type(self._parser).__name__}.render"
            raise ExtensionError(f"{by} gave {messages!r}; it must return the messages (Message) that show the outputs")
        return messages

    async def call(self, text: str, turn: int) -> tuple[list[ToolCall], str]:
        """Run the calls in `text` concurrently; returns their records in order, and why one could not run ("" if all
        did).

        If any call is invalid none is run, and the only record tells the model why.
        """
        try:
            with called(_PARSER):
                requests = self._parser.parse(text)
        except ParseError as error:
            return [self.unread(error, turn)], ""
        return await self.run(requests, turn)

    def unread(self, error: ParseError, turn: int) -> ToolCall:
        """Return the record of calls that cannot be run."""
        output = cut_middle(well_formed(f"[parse_error] {error}"), self._max_chars)
        return ToolCall(turn, "", {}, "parse_error", output, 0.0)

    async def run(self, requests: Sequence[ToolCallRequest], turn: int) -> tuple[list[ToolCall], str]:
        """Run calls as `call` does."""
        try:
            for request in requests:
                self._check(request)
        except ParseError as error:
            return [self.unread(error, turn)], ""
        # An exception is raised once all calls have ended: none may still use the tool when the group is discarded.
        results = await asyncio.gather(*(self._run(request, turn) for request in requests), return_exceptions=True)
        done: list[tuple[ToolCall, str]] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return [call for call, _ in done], next((failure for _, failure in done if failure), "")

    def _check(self, request: ToolCallRequest) -> None:
        """Raises ParseError, with a message for the model, for another tool or arguments than there are."""
        name = request.name
        if not isinstance(name, str) or name not in self._tools:
            ours = [repr(tool) for tool in self._tools]
            offered = f"the only tool is {ours[0]}" if len(ours) == 1 else f"the tools are {', '.join(ours)}"
            raise ParseError(f"unknown tool {name!r}; {offered}")
        _check_arguments(self._tools[name].schema, request.arguments)

    async def _run(self, request: ToolCallRequest, turn: int) -> tuple[ToolCall, str]:
        began_at, started = time.time(), time.monotonic()
        try:
            with called(f"the tool {request.name!r}"):
                result = await self._tools[request.name](request.arguments)
                _check_result(result, request.name)
            failure = "" if result.status in _STATUSES else f"the tool answered with status {result.status!r}"
        except ToolUnavailable as error:
            failure = f"the tool is unavailable: {error}"
        wall_s = time.monotonic() - started
        call = ToolCall(turn, request.name, request.arguments, "infrastructure_error", "", wall_s, began_at=began_at)
        if not failure:
            call.status, call.output = result.status, cut_middle(well_formed(result.text), self._max_chars)
            call.exec_s = result.exec_s
        return call, failure


def _check_result(result: Any, tool: str) -> None:
    """Raises TypeError for what is no ToolResult of a text, a status, and seconds or None."""
    answered = f"the tool {tool!r} answered with"
    if not isinstance(result, ToolResult):
        raise TypeError(f"{answered} a {type(result).__name__}; it must be a ToolResult")
    for name in ("text", "status"):
        if not isinstance(value := getattr(result, name), str):
            raise TypeError(f"{answered} a {name} of {type(value).__name__}; its {name} must be a str")
    seconds = result.exec_s
    if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
        raise TypeError(f"{answered} an exec_s of {seconds!r:.80}; it must be seconds, or None")


def well_formed(text: str) -> str:
    """Return the text as tokenizers take it: lone surrogates are replaced by U+FFFD, and pairs of them are joined."""
    text = str.__str__(text)  # of a subclass too, whose own methods the trainer may not have
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _name(tool: Tool) -> str:
    return str(tool.schema["function"]["name"])


def _check_arguments(schema: Schema, arguments: Any) -> None:
    """Raises ParseError unless `arguments` are an object that fits `schema`, without unknown properties."""
    from jsonschema import Draft202012Validator

    parameters = schema["function"].get("parameters", {})
    required, known = set(parameters.get("required", ())), set(parameters.get("properties", ()))
    if not isinstance(arguments, dict) or not required <= arguments.keys() <= known:
        raise ParseError(f'"arguments" must be an object {_wanted(required, known - required)}')
    for error in Draft202012Validator(parameters).iter_errors(arguments):
        where = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "type" and isinstance(error.validator_value, str):
            wanted = _A.get(error.validator_value, error.validator_value)
            raise ParseError(f'"{where}" must be {wanted}, found {type(error.instance).__name__}')
        raise ParseError(f'"{where}": {error.message}')
    for key, value in arguments.items():
        _check_encodable(value, f'"{key}"')


def _check_encodable(value: Any, name: str) -> None:
    """Raises ParseError for a value of JSON whose texts hold half a character; name: of the value, for the model."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ParseError(f"{name} contains an unpaired surrogate and cannot be encoded") from None


def _wanted(required: set[str], optional: set[str]) -> str:
    """The keys of an object in words."""
    if not required:
        return f"with no other keys than {_quoted(optional)}" if optional else "without keys"
    also = f" and, if needed, {_quoted(optional)}" if optional else ""
    return f"with exactly the key{'s' * (len(required) > 1)} {_quoted(required)}{also}"


def _quoted(names: set[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))
