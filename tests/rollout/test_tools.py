"""The tool-call reader is strict, and what the model sees back is bounded and honest about cuts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ctpo_megatron.environments.tools import (
    ParseError,
    cut_middle,
    mentions_call,
    observation_text,
    parse_call,
    parse_error_text,
)


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def good(code: str = "print(1)") -> str:
    return json.dumps({"name": "code_interpreter", "arguments": {"code": code}})


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (call(good()), "print(1)"),
        (call("\n" + good() + "\n"), "print(1)"),
        ("Let me compute.\n" + call(good()) + "\n ", "print(1)"),
        (call(good('print("<b>")\nx = 1')), 'print("<b>")\nx = 1'),
        (call(good("")), ""),
        (call('{"arguments": {"code": "\\u00e9"}, "name": "code_interpreter"}'), "é"),
    ],
)
def test_well_formed(text: str, code: str) -> None:
    assert parse_call(text).code == code


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>" + good(), "exactly one"),
        (good() + "</tool_call>", "exactly one"),
        (call(good()) + call(good()), "exactly one"),
        (call(good("</tool_call>")), "exactly one"),
        ("</tool_call>" + good() + "<tool_call>", "comes before"),
        (call(good()) + " done", "nothing may follow"),
        (call(""), "invalid JSON"),
        (call("print(1)"), "invalid JSON"),
        (call(good()[:-1]), "invalid JSON"),
        (call(good() + good()), "invalid JSON"),
        (call("{'name': 'code_interpreter', 'arguments': {'code': '1'}}"), "invalid JSON"),
        (call('{"name": "code_interpreter", "arguments": {"code": "a\nb"}}'), "invalid JSON"),
        (call("[" * 100_000), "nested too deeply"),
        (call('{"name": ' + "1" * 5000 + "}"), "number too long"),
        (call("[]"), "must be a JSON object"),
        (call('"code"'), "must be a JSON object"),
        (call("{}"), "exactly the keys"),
        (call('{"name": "code_interpreter"}'), "exactly the keys"),
        (call('{"name": "code_interpreter", "arguments": {"code": "1"}, "id": 1}'), "exactly the keys"),
        (call('{"name": "code_interpreter", "name": "x", "arguments": {"code": "1"}}'), "repeats a key"),
        (call('{"name": "python", "arguments": {"code": "1"}}'), "unknown tool"),
        (call('{"name": null, "arguments": {"code": "1"}}'), "unknown tool"),
        (call('{"name": ["code_interpreter"], "arguments": {"code": "1"}}'), "unknown tool"),
        (call('{"name": "code_interpreter", "arguments": "print(1)"}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {}}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {"code": "1", "timeout": 3}}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {"code": 1}}'), "must be a string"),
        (call('{"name": "code_interpreter", "arguments": {"code": ["print(1)"]}}'), "must be a string"),
        (call('{"name": "code_interpreter", "arguments": {"code": "\\ud800"}}'), "surrogate"),
    ],
)
def test_malformed(text: str, reason: str) -> None:
    assert mentions_call(text)
    with pytest.raises(ParseError, match=reason) as caught:
        parse_call(text)
    shown = parse_error_text(caught.value, 4096)
    assert shown.startswith("[parse_error] ")


def test_plain_text_is_no_call() -> None:
    assert not mentions_call("The answer is \\boxed{2}. tool_call")


def result(status: str = "success", stdout: str = "", stderr: str = "") -> SimpleNamespace:
    return SimpleNamespace(status=status, stdout=stdout, stderr=stderr, wall_s=0.1)


def test_success_shows_stdout_only() -> None:
    assert observation_text(result(stdout="2\n", stderr="warning"), 100) == "2"
    assert observation_text(result(), 100) == ""


def test_errors_show_status_and_stderr() -> None:
    text = observation_text(result("runtime_error", "partial\n", "Traceback\nNameError: x\n"), 1000)
    assert text == "[runtime_error]\nTraceback\nNameError: x\n[stdout before the error]\npartial"
    assert observation_text(result("timeout"), 1000) == "[timeout]"


def test_long_stderr_keeps_its_tail() -> None:
    text = observation_text(result("runtime_error", "", "a" * 5000 + "ValueError: end"), 10_000)
    assert text.endswith("ValueError: end")
    assert "3015 characters cut" in text


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_cut_keeps_head_and_tail_and_counts(limit: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    shown = cut_middle(text, limit)
    head, note, tail = shown.split("\n")
    assert note == f"[... {1000 - limit} characters cut ...]"
    assert len(head) + len(tail) == limit
    assert text.startswith(head)
    assert text.endswith(tail)


def test_no_cut_at_the_limit() -> None:
    assert cut_middle("abc", 3) == "abc"
