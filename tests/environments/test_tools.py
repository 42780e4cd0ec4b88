"""The tool-call reader is strict, and what the model sees back is bounded and honest about cuts."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ctpo_megatron.base.extensions import ExtensionError
from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.environments import (
    FencedParser,
    HermesParser,
    Message,
    PythonTool,
    Toolbox,
    ToolResult,
    ToolUnavailable,
)


class Interpreter:
    """Repeats its program; counts how many calls run at once."""

    schema = PythonTool.schema
    running = most = 0

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return ToolResult(arguments["code"])


class Search:
    """A second tool; with the query "down" it is unavailable."""

    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1}},
                "required": ["query"],
            },
        },
    }

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        if arguments["query"] == "down":
            raise ToolUnavailable("no index")
        return ToolResult(f"found {arguments}", "runtime_error" if arguments["query"] == "bad" else "success")


def run(text: str, *tools: Any, parallel: bool = False, max_chars: int = 4096) -> tuple[list[ToolCall], str]:
    """What becomes of a model turn."""
    toolbox = Toolbox(tools or [Interpreter()], HermesParser(parallel_calls=parallel), max_chars)
    assert toolbox.mentions_call(text)
    return asyncio.run(toolbox.call(text, 1))


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def good(code: str = "print(1)") -> str:
    return json.dumps({"name": "code_interpreter", "arguments": {"code": code}})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>" + good(), "exactly one"),
        (good() + "</tool_call>", "exactly one"),
        ("</tool_call>" + good() + "<tool_call>", "comes before"),
        (call(good()) + " done", "nothing may follow"),
        (call(""), "invalid JSON"),
        (call(good()[:-1]), "invalid JSON"),
        (call(good() + good()), "invalid JSON"),
        (call('{"name": "code_interpreter", "arguments": {"code": "a\nb"}}'), "invalid JSON"),
        (call("[" * 100_000), "nested too deeply"),
        (call('{"name": ' + "1" * 5000 + "}"), "number too long"),
        (call("[]"), "must be a JSON object"),
        (call('{"name": "code_interpreter"}'), "exactly the keys"),
        (call('{"name": "code_interpreter", "arguments": {"code": "1"}, "id": 1}'), "exactly the keys"),
        (call('{"name": "code_interpreter", "name": "x", "arguments": {"code": "1"}}'), "repeats a key"),
        (call('{"name": "python", "arguments": {"code": "1"}}'), "unknown tool"),
        (call('{"name": ["code_interpreter"], "arguments": {"code": "1"}}'), "unknown tool"),
        (call('{"name": "code_interpreter", "arguments": "print(1)"}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {}}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {"code": "1", "timeout": 3}}'), "exactly the key"),
        (call('{"name": "code_interpreter", "arguments": {"code": 1}}'), "must be a string"),
        (call('{"name": "code_interpreter", "arguments": {"code": "\\ud800"}}'), "surrogate"),
    ],
)
def test_malformed(text: str, reason: str) -> None:
    [record], failure = run(text)
    assert (record.name, record.arguments, record.status, failure) == ("", {}, "parse_error", "")
    assert record.output.startswith("[parse_error] ")
    assert reason in record.output


def test_plain_text_is_no_call() -> None:
    assert not HermesParser().mentions_call("The answer is \\boxed{2}. tool_call")
    assert not Toolbox([], HermesParser(), 100).mentions_call(call(good()))  # there is nothing to call


def observation_text(execution: Any) -> str:
    return PythonTool.shown(execution, 4.0).text


def result(status: str = "success", stdout: str = "", stderr: str = "") -> SimpleNamespace:
    return SimpleNamespace(status=status, stdout=stdout, stderr=stderr, wall_s=0.01)


def test_the_record_of_a_call_has_how_long_it_waited_and_ran() -> None:
    class Queued(Interpreter):
        async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
            await asyncio.sleep(0.05)
            return PythonTool.shown(result("runtime_error"), 4.0)

    before = time.time()
    ([record], _), ([unknown], _) = run(call(good()), Queued()), run(call(good()))
    assert record.began_at is not None and before <= record.began_at <= time.time() - record.wall_s + 0.01
    assert record.exec_s == PythonTool.shown(result(), 4.0).exec_s == 0.01
    assert record.queue_s == record.wall_s - 0.01 >= 0.04
    assert unknown.exec_s is None and unknown.queue_s is None


def test_success_shows_stdout_only() -> None:
    assert observation_text(result(stdout="2\n", stderr="warning")) == "2"
    assert observation_text(result()) == ""


def test_errors_show_status_and_stderr() -> None:
    text = observation_text(result("runtime_error", "partial\n", "Traceback\nNameError: x\n"))
    assert text == "[runtime_error]\nTraceback\nNameError: x\n[stdout before the error]\npartial"
    told = "[timeout] A program may compute for 4 s, and end after 8 s."
    assert observation_text(result("timeout")) == told
    began = observation_text(result("timeout", "start\n"))
    assert began == f"{told}\n[stdout before the error]\nstart"


def test_long_stderr_keeps_its_tail() -> None:
    text = observation_text(result("runtime_error", "", "a" * 5000 + "ValueError: end"))
    assert text.endswith("ValueError: end")
    assert "3015 characters cut" in text


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_cut_keeps_head_and_tail_and_counts(limit: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    ([record], _), ([whole], _) = run(call(good(text)), max_chars=limit), run(call(good(text[:limit])), max_chars=limit)
    head, note, tail = record.output.split("\n")
    assert note == f"[... {1000 - limit} characters cut ...]"
    assert len(head) + len(tail) == limit
    assert text.startswith(head) and text.endswith(tail)
    assert whole.output == text[:limit]


def search(**arguments: Any) -> str:
    return call(json.dumps({"name": "search", "arguments": arguments}))


def test_several_calls_run_at_once_and_are_answered_in_order() -> None:
    interpreter = Interpreter()
    text = "Both.\n" + call(good("a")) + "\n" + search(query="q") + call(good("b"))
    calls, failure = run(text, interpreter, Search(), parallel=True)
    assert failure == ""
    assert [(record.name, record.output) for record in calls] == [
        ("code_interpreter", "a"),
        ("search", "found {'query': 'q'}"),
        ("code_interpreter", "b"),
    ]
    assert interpreter.most == 2
    messages = HermesParser().render(calls)
    assert messages[1] == Message("tool", "found {'query': 'q'}", "search")
    assert [message.content for message in messages] == [record.output for record in calls]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (call(good()) + "<tool_call>", "needs its own </tool_call>, found 2 and 1"),
        (call(good()) + " and " + call(good()), "nothing may follow"),
        (call(good()) + call("{"), "invalid JSON"),
        (call(good()) + search(query=1), '"query" must be a string, found int'),
        (call(good()) + call('{"name": "find", "arguments": {}}'), "the tools are 'code_interpreter', 'search'"),
    ],
)
def test_one_bad_call_among_several_is_the_only_answer(text: str, reason: str) -> None:
    interpreter = Interpreter()
    [record], _ = run(text, interpreter, Search(), parallel=True)
    assert record.status == "parse_error"
    assert reason in record.output
    assert interpreter.most == 0


def test_an_unavailable_tool_is_told_from_a_failed_call() -> None:
    text = search(query="bad") + search(query="down") + search(query="q")
    calls, failure = run(text, Search(), parallel=True)
    assert [record.status for record in calls] == ["runtime_error", "infrastructure_error", "success"]
    assert failure == "the tool is unavailable: no index"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, '"arguments" must be an object with exactly the key "query" and, if needed, "limit"'),
        ({"query": "q", "other": 1}, '"arguments" must be an object with exactly the key "query" and, if needed'),
        ({"query": "q", "limit": "1"}, '"limit" must be an integer, found str'),
        ({"query": "q", "limit": 0}, '"limit": 0 is less than the minimum of 1'),
    ],
)
def test_arguments_are_held_to_the_schema(arguments: dict[str, Any], reason: str) -> None:
    ([refused], _), ([done], _) = run(search(**arguments), Search()), run(search(query="q", limit=3), Search())
    assert refused.status == "parse_error" and refused.output.startswith(f"[parse_error] {reason}")
    assert done.output == "found {'query': 'q', 'limit': 3}"


def test_a_tool_without_required_arguments() -> None:
    class Now:
        schema = {"function": {"name": "now"}}  # noqa: RUF012

        async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
            return ToolResult(f"noon, {arguments}")

    ([told], _), ([refused], _) = (
        run(call(json.dumps({"name": "now", "arguments": arguments})), Now()) for arguments in ({}, {"zone": "UTC"})
    )
    assert (told.output, refused.status) == ("noon, {}", "parse_error")
    assert "an object without keys" in refused.output


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="have one name"):
        Toolbox([Search(), Search()], HermesParser(), 100)


@pytest.mark.parametrize("messages", [[], None, ["42"]])
def test_a_parser_that_shows_nothing_is_named(messages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HermesParser, "render", lambda self, calls: messages)
    with pytest.raises(ExtensionError, match=r"HermesParser\.render gave .*; it must return the messages"):
        Toolbox([Interpreter()], HermesParser(), 100).render([ToolCall(1, "", {}, "success", "42", 0.0)])


@pytest.mark.parametrize(
    ("parser", "shown"),
    [
        (HermesParser(), "[no output]"),
        (HermesParser(empty_output="nothing was printed"), "nothing was printed"),
        (HermesParser(empty_output=""), ""),
        (FencedParser(), "The program printed nothing."),
    ],
)
def test_a_program_that_prints_nothing_is_told_so(parser: Any, shown: str) -> None:
    silent, said = ToolCall(1, "python", {}, "success", "", 0.0), ToolCall(1, "python", {}, "success", " ", 0.0)
    assert parser.render([silent])[0].content == shown
    assert parser.render([said])[0].content.endswith(" ")
