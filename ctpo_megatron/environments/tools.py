"""The one tool, code_interpreter: its schema, the strict reader of a call, and the text the model sees back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

TOOL_NAME = "code_interpreter"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

TOOL_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Run a Python program and return what it prints. Every call starts a fresh interpreter.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python source; print() what you need to see."}},
            "required": ["code"],
        },
    },
}
"""OpenAI-style function schema, as chat templates expect it in `tools=[...]`."""

_STDERR_CHARS = 2000


class ExecutionResultLike(Protocol):
    """What a finished execution looks like (the sandbox client's result)."""

    status: str
    stdout: str
    stderr: str
    wall_s: float


class ToolUnavailable(Exception):
    """The tool could not be reached or failed for reasons that are not the program's fault."""


class ParseError(ValueError):
    """A tool call that does not follow the format; the message is written for the model."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A well-formed call: the Python source to run."""

    code: str


def mentions_call(text: str) -> bool:
    """True when a model turn contains either tag, so that it must be read as a tool call, well-formed or not."""
    return CALL_OPEN in text or CALL_CLOSE in text


def parse_call(text: str) -> ParsedCall:
    """Read the one tool call of a model turn (text without the stop token).

    Prose may come before the call, nothing but white space after it. Raises ParseError on anything that is not exactly
    one call of `code_interpreter` with the single string argument `code`.
    """
    if text.count(CALL_OPEN) != 1 or text.count(CALL_CLOSE) != 1:
        raise ParseError(
            f"expected exactly one {CALL_OPEN} and one {CALL_CLOSE} in a turn, "
            f"found {text.count(CALL_OPEN)} and {text.count(CALL_CLOSE)}"
        )
    _, _, rest = text.partition(CALL_OPEN)
    payload, close, tail = rest.partition(CALL_CLOSE)
    if not close:
        raise ParseError(f"{CALL_CLOSE} comes before {CALL_OPEN}")
    if tail.strip():
        raise ParseError(f"nothing may follow {CALL_CLOSE}")
    call = _load_object(payload)
    if call.keys() != {"name", "arguments"}:
        raise ParseError(f'the call needs exactly the keys "name" and "arguments", found {sorted(call)}')
    if call["name"] != TOOL_NAME:
        raise ParseError(f"unknown tool {call['name']!r}; the only tool is {TOOL_NAME!r}")
    arguments = call["arguments"]
    if not isinstance(arguments, dict) or arguments.keys() != {"code"}:
        raise ParseError('"arguments" must be an object with exactly the key "code"')
    code = arguments["code"]
    if not isinstance(code, str):
        raise ParseError(f'"code" must be a string, found {type(code).__name__}')
    try:
        code.encode("utf-8")
    except UnicodeEncodeError:
        raise ParseError('"code" contains an unpaired surrogate and cannot be encoded') from None
    return ParsedCall(code)


def _load_object(payload: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ParseError("an object repeats a key")
        return dict(pairs)

    try:
        call = json.loads(payload, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ParseError(f"invalid JSON: {error.msg} at character {error.pos}") from None
    except (RecursionError, ValueError) as error:  # nesting, or an integer of thousands of digits
        if isinstance(error, ParseError):
            raise
        raise ParseError("invalid JSON: nested too deeply or a number too long") from None
    if not isinstance(call, dict):
        raise ParseError(f"the call must be a JSON object, found {type(call).__name__}")
    return call


def cut_middle(text: str, max_chars: int) -> str:
    """`text` in at most `max_chars` characters of its own: head and tail kept, with a note of how many were cut."""
    if len(text) <= max_chars:
        return text
    head = (max_chars + 1) // 2
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars} characters cut ...]\n{text[len(text) - tail :]}"


def observation_text(result: ExecutionResultLike, max_chars: int) -> str:
    """What the model is shown of an execution: stdout on success, else status, stderr tail and any stdout.

    At most `max_chars` characters of program output (the note of a cut comes on top). Trailing newlines are dropped,
    as the template writes its own.
    """
    stdout = result.stdout.rstrip("\n")
    if result.status == "success":
        return cut_middle(stdout, max_chars)
    stderr = result.stderr.strip("\n")
    if len(stderr) > _STDERR_CHARS:
        stderr = f"[... {len(stderr) - _STDERR_CHARS} characters cut ...]\n{stderr[-_STDERR_CHARS:]}"
    parts = [f"[{result.status}]", stderr, f"[stdout before the error]\n{stdout}" if stdout else ""]
    return cut_middle("\n".join(part for part in parts if part), max_chars)


def parse_error_text(error: ParseError, max_chars: int) -> str:
    """What the model is shown of a malformed call."""
    return cut_middle(f"[parse_error] {error}", max_chars)
