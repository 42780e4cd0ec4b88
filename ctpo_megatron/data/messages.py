"""Conversations of data files: checked and converted to the form that chat templates expect.

The form is OpenAI's: {role, content}, also `tool_calls` for an assistant and `tool_call_id` for a tool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id", "name"}}

ChatMessage = dict[str, Any]


def check_messages(value: object) -> str | None:
    """Return the reason why `value` is not a conversation, or None when it is one. A null field counts as missing."""
    if not isinstance(value, list) or not value:
        return "expected a non-empty list of {role, content}"
    called: set[str] = set()
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            return f"message {index} is not a {{role, content}} record"
        if reason := _check_message(message, called):
            return f"message {index} {reason}"
        called |= {str(call["id"]) for call in message.get("tool_calls") or [] if call.get("id")}
    return None


def _check_message(message: Mapping[str, Any], called: set[str]) -> str | None:
    role = message.get("role")
    if role not in ROLES:
        return f"has role {role!r}, expected one of {', '.join(ROLES)}"
    calls = message.get("tool_calls") if role == "assistant" else None
    if isinstance(message.get("content"), list):
        return "has a list of parts in 'content'; write the text alone"
    if not isinstance(message.get("content"), str) and not (calls and message.get("content") is None):
        return "has no text in 'content'"
    allowed = {"role", "content", *_FIELDS.get(role, ())}
    if extra := sorted(key for key, cell in message.items() if key not in allowed and cell is not None):
        return f"has fields that are not supported: {', '.join(extra)}"
    answered = message.get("tool_call_id") if role == "tool" else None
    if answered and called and str(answered) not in called:
        return f"answers the call {answered!r}, which no message before it makes"
    return _check_calls(calls) if calls is not None else None


def _check_calls(calls: object) -> str | None:
    if not isinstance(calls, list):
        return "has 'tool_calls' that are no list"
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            return f"has a call {place} without function: {{name, arguments}}"
        if not isinstance(_from_json(function.get("arguments")), dict | None):
            return f"has a call {place} whose arguments are no JSON object"
    return None


def check_tools(value: object) -> str | None:
    """Return the reason why `value` is not a list of OpenAI function schemas (or its JSON text), or None."""
    tools = _from_json(value)
    if not isinstance(tools, list):
        return "expected a list of function schemas, or its JSON text"
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f'tool {place} is no schema {{"type": "function", "function": {{"name": ..., ...}}}}'
    try:
        json.dumps(tools)
    except TypeError as error:
        return f"cannot be written as JSON: {error}"
    return None


def plain_messages(value: Sequence[Mapping[str, Any]]) -> tuple[ChatMessage, ...]:
    """Checked messages as templates expect them: no null fields, arguments as objects, a text in every message."""
    return tuple(_plain(message) for message in value)


def plain_tools(value: object) -> list[dict[str, Any]]:
    """Checked tool schemas without the null fields that a parquet struct may carry."""
    tools: list[dict[str, Any]] = _without_nulls(_from_json(value))
    return tools


def _plain(message: Mapping[str, Any]) -> ChatMessage:
    plain: ChatMessage = {"role": message["role"], "content": message.get("content") or ""}
    plain |= {key: cell for key, cell in message.items() if key not in ("role", "content", "tool_calls") and cell}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    read = _from_json(arguments) if isinstance(arguments, str) else _without_nulls(arguments)
    plain = {"type": "function", "function": {"name": function["name"], "arguments": read or {}}}
    return {"id": call["id"], **plain} if call.get("id") else plain


def _from_json(value: Any) -> Any:
    """Decode a value that may be given as JSON text; other text is returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(cell) for key, cell in value.items() if cell is not None}
    return [_without_nulls(cell) for cell in value] if isinstance(value, list) else value
