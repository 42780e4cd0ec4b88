"""Users' code may raise anything and return any text: it ends neither our tasks nor our process, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ctpo_megatron.base.extensions import ExtensionError, called, load, shown
from ctpo_megatron.config import DataConfig, RolloutConfig
from ctpo_megatron.environments import (
    HermesParser,
    Message,
    MessageTemplate,
    ToolEnvironment,
    ToolResult,
    make_environment,
)
from ctpo_megatron.rollouts.filters import FILTERS
from tests.engines.tiny_model import tiny_tokenizer
from tests.environments.test_episode import Codec, Conversation, Engine, Tool, generate, play
from tests.rollouts.test_filters import episode, masked

RAISED = [asyncio.CancelledError("a time limit"), KeyboardInterrupt("k"), GeneratorExit("g"), SystemExit("s")]
CALLS = [[10, 0], [1, 0]]
"""A turn that calls the tool, and an answer."""


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Where episodes are played: Ray runs the event loop of an actor beside its main thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(timeout=60)


def raising(error: BaseException) -> Callable[..., Any]:
    async def raises(*_: object) -> None:
        raise error

    return raises


def raising_at_once(error: BaseException) -> Callable[..., Any]:
    def raises(*_: object) -> None:
        raise error

    return raises


def with_parser(method: str, error: BaseException) -> None:
    parser = HermesParser()
    setattr(parser, method, raising_at_once(error))
    play(Engine(*CALLS), parser=parser)


def with_filter(error: BaseException) -> None:
    with mock.patch.dict(FILTERS, truncated=raising_at_once(error)):
        masked(episode("p"), "truncated")


def with_factory(error: BaseException) -> None:
    with mock.patch.object(ToolEnvironment, "__init__", raising_at_once(error)):
        make_environment(RolloutConfig(), DataConfig(train=("unused",)))


PARTS: dict[str, tuple[str, Callable[[BaseException], Any]]] = {
    "tool": (r"the tool 'code_interpreter' raised", lambda error: play(Engine(*CALLS), tool=Tool(error))),
    "environment": (
        "the environment raised",
        lambda error: play(Engine([1, 0]), environment=Conversation(generate, raising(error))),
    ),
    **{
        method: (r"rollout\.tool_parser raised", partial(with_parser, method))
        for method in ("mentions_call", "parse", "render")
    },
    "filter": (r"truncated, prompt 'p'.*raised", with_filter),
    "factory": ("tools raised", with_factory),
}


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize(("said", "use"), PARTS.values(), ids=PARTS)
def test_what_is_no_exception_is_named_with_the_part_that_raised_it(
    said: str, use: Callable[[BaseException], Any], error: BaseException
) -> None:
    kind = ValueError if use is with_filter else ExtensionError
    with pytest.raises(kind, match=rf"{said} {type(error).__name__}"):
        in_a_thread(lambda: use(error))


def test_our_own_cancellation_passes() -> None:
    async def cancel_a_task() -> bool:
        async def wait() -> None:
            with called("the tool"):
                await asyncio.Event().wait()

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(cancel_a_task())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_what_signal_handlers_raise_in_the_main_thread_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), called("the filter"):
        raise error


def test_an_ordinary_exception_stays_itself() -> None:
    with pytest.raises(KeyError), called("the tool"):
        raise KeyError


TEXTS = [
    ("\ud800", "\ufffd"),
    ("half \ud83d", "half \ufffd"),
    ("\ude00\ud83d", "\ufffd\ufffd"),
    ("\ud83d\ude00", "\U0001f600"),
    ("\udcff from a path", "\ufffd from a path"),
    ("well \U0001f600\0", "well \U0001f600\0"),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS, ids=ascii)
def test_half_characters_are_replaced_wherever_users_hand_over_text(text: str, expected: str) -> None:
    codec = Codec()
    found = play(Engine(*CALLS), codec, tool=Tool(ToolResult(text)))
    assert found.tool_calls[0].output == expected == codec.seen[0]

    async def end(episode: Any) -> None:
        episode.finish(text)

    assert play(Engine([1, 0]), environment=Conversation(generate, end)).final_text == expected


class OwnText(str):
    """A text with methods of its own."""

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def encode(self, *_: Any) -> bytes:
        raise SystemExit


def test_a_text_with_methods_of_its_own_is_taken_as_a_text() -> None:
    """The trainer may be unable to load its class."""
    found = play(Engine(*CALLS), tool=Tool(ToolResult(OwnText("half \ud83d"))))
    assert type(found.tool_calls[0].output) is str and found.tool_calls[0].output == "half \ufffd"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        *[(ToolResult(text), "its text must be a str") for text in (None, 7, b"bytes")],  # type: ignore[arg-type]
        (ToolResult("1", 7), "its status must be a str"),  # type: ignore[arg-type]
        *[
            (ToolResult("1", "success", seconds), "it must be seconds, or None")  # type: ignore[arg-type]
            for seconds in (float("nan"), -1.0, float("inf"), "soon")
        ],
        (None, "a NoneType; it must be a ToolResult"),
        ("text", "a str; it must be a ToolResult"),
    ],
    ids=repr,
)
def test_an_answer_of_a_tool_that_is_none_is_named(answer: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"the tool 'code_interpreter' answered with .*{shown}"):
        play(Engine(*CALLS), tool=Tool(answer))


@pytest.mark.parametrize(("text", "reason"), [(7, "answer"), (None, "answer"), ("1", "\x1b[2J"), ("1", ["answer"])])
def test_an_episode_that_is_finished_with_anything_else_is_named(text: Any, reason: Any) -> None:
    async def end(episode: Any) -> None:
        episode.finish(text, reason)

    with pytest.raises((TypeError, ValueError), match=r"^environment: .*finish\(\)"):
        play(Engine([1, 0]), environment=Conversation(generate, end))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
        (ValueError("\x1b]0;title\x07\u202e\ud800\n"), r"ValueError: \x1b]0;title\x07\u202e\ud800\n"),
    ],
    ids=ascii,
)
def test_an_exception_is_shown_on_one_line_that_steers_nothing(error: Exception, expected: str) -> None:
    assert shown(error) == expected


@pytest.mark.parametrize(
    "line", ["raise SystemExit(0)", "raise KeyboardInterrupt", "import asyncio\nraise GeneratorExit"]
)
def test_a_module_that_ends_the_process_when_it_is_imported_is_named(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a script without a main guard."""
    (tmp_path / "script_of_a_user.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ExtensionError, match=r"importing script_of_a_user failed: (SystemExit|Keyb|Gen)"):
        in_a_thread(lambda: load("script_of_a_user:score"))


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("text", "must be a Message, not a str"),
        ({"role": "user", "content": "x"}, "must be a Message, not a dict"),
        (Message("user", None), "the content of a Message must be a str, not a NoneType"),  # type: ignore[arg-type]
        (Message(7, "x"), "the role of a Message must be a str"),  # type: ignore[arg-type]
        (Message("tool", "x", b"n"), "the name of a Message must be a str"),  # type: ignore[arg-type]
    ],
)
def test_a_message_that_is_none_is_named(message: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=shown):
        MessageTemplate(tiny_tokenizer()).encode([message])


def test_a_message_with_half_a_character_is_tokenized() -> None:
    template = MessageTemplate(tiny_tokenizer())
    assert template.encode([Message("user", "half \ud83d")]) == template.encode([Message("user", "half \ufffd")])
    assert template.encode([Message("\ud83d", OwnText("x"))]) == template.encode([Message("\ufffd", "x")])
