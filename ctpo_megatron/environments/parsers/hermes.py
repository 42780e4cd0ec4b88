"""Calls in the Hermes format: one JSON object between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.environments.protocol import Message, ParseError, ToolCallRequest, without_thinking

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Strict: text may come before the calls, only white space between and after them. Thinking is ignored.

    parallel_calls: whether a turn may hold several calls; otherwise exactly one. empty_output: what the model is shown
    where a tool answered with no text, as a program that prints nothing does.
    """

    example = f'{CALL_OPEN}\n{{"name": "code_interpreter", "arguments": {{"code": "print(6 * 7)"}}}}\n{CALL_CLOSE}'

    def __init__(self, parallel_calls: bool = False, empty_output: str = "[no output]") -> None:
        self._parallel_calls = parallel_calls
        self._empty_output = empty_output

    def mentions_call(self, text: str) -> bool:
        """True when a turn contains either tag, so that it must be read as a tool call, well-formed or not."""
        text = without_thinking(text)
        return CALL_OPEN in text or CALL_CLOSE in text

    def parse(self, text: str) -> list[ToolCallRequest]:
        """See ToolParser. Raises ParseError for any deviation from the format."""
        text = without_thinking(text)
        opened, closed = text.count(CALL_OPEN), text.count(CALL_CLOSE)
        if self._parallel_calls and opened != closed:
            raise ParseError(f"every {CALL_OPEN} needs its own {CALL_CLOSE}, found {opened} and {closed}")
        if not self._parallel_calls and (opened, closed) != (1, 1):
            raise ParseError(
                f"expected exactly one {CALL_OPEN} and one {CALL_CLOSE} in a turn, found {opened} and {closed}"
            )
        return [_call(part) for part in text.split(CALL_OPEN)[1:]]

    def said(self, text: str) -> str:
        """Return what comes before the calls, thinking included."""
        called = without_thinking(text)
        return text[: len(text) - len(called) + called.index(CALL_OPEN)].rstrip()

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Return one tool message per call."""
        return [Message("tool", call.output or self._empty_output, call.name) for call in calls]


def _call(part: str) -> ToolCallRequest:
    """The call in the text after one CALL_OPEN, up to the next one."""
    payload, close, tail = part.partition(CALL_CLOSE)
    if not close:
        raise ParseError(f"{CALL_CLOSE} comes before {CALL_OPEN}")
    if tail.strip():
        raise ParseError(f"nothing may follow {CALL_CLOSE}")
    call = _load_object(payload)
    if call.keys() != {"name", "arguments"}:
        raise ParseError(f'the call needs exactly the keys "name" and "arguments", found {sorted(call)}')
    return ToolCallRequest(call["name"], call["arguments"])


def _load_object(payload: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ParseError("an object repeats a key")
        return dict(pairs)

    try:
        call = json.loads(payload, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ParseError(f"invalid JSON: {error.msg} at character {error.pos}") from None
    except (RecursionError, ValueError) as error:  # deep nesting, or an integer of thousands of digits
        if isinstance(error, ParseError):
            raise
        raise ParseError("invalid JSON: nested too deeply or a number too long") from None
    if not isinstance(call, dict):
        raise ParseError(f"the call must be a JSON object, found {type(call).__name__}")
    return call
