"""Users' code may raise anything and return any text: it ends neither our tasks nor our process, and is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ctpo_megatron.base.extensions import ExtensionError, called
from ctpo_megatron.environments.parsers.hermes import HermesParser
from ctpo_megatron.environments.protocol import Message, ToolResult
from ctpo_megatron.environments.template import MessageTemplate
from ctpo_megatron.environments.toolbox import well_formed
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


class BadParser(HermesParser):
    """Raises where its `method` is called."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()

        def raises(*_: object) -> None:
            raise error

        setattr(self, method, raises)


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_a_tool_that_raises_what_is_no_exception_is_named(error: BaseException) -> None:
    tool = Tool()
    tool.answer = error  # type: ignore[assignment]
    with pytest.raises(ExtensionError, match=rf"the tool 'code_interpreter' raised {type(error).__name__}"):
        in_a_thread(lambda: play(Engine(*CALLS), tool=tool))


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_an_environment_that_raises_what_is_no_exception_is_named(error: BaseException) -> None:
    with pytest.raises(ExtensionError, match=rf"the environment raised {type(error).__name__}"):
        in_a_thread(lambda: play(Engine([1, 0]), environment=Conversation(generate, raising(error))))


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("method", ["mentions_call", "parse", "render"])
def test_a_parser_that_raises_what_is_no_exception_is_named(method: str, error: BaseException) -> None:
    with pytest.raises(ExtensionError, match=rf"rollout\.tool_parser raised {type(error).__name__}"):
        in_a_thread(lambda: play(Engine(*CALLS), parser=BadParser(method, error)))


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_a_filter_that_raises_what_is_no_exception_is_named(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise error

    monkeypatch.setitem(FILTERS, "truncated", raises)
    with pytest.raises(ValueError, match=rf"truncated, prompt 'p'.*raised {type(error).__name__}"):
        in_a_thread(lambda: masked(episode("p"), "truncated"))


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
    assert well_formed(text) == expected
    codec = Codec()
    found = play(Engine(*CALLS), codec, tool=Tool(ToolResult(text)))
    assert found.tool_calls[0].output == expected == codec.seen[0]

    async def end(episode: Any) -> None:
        episode.finish(text)

    assert play(Engine([1, 0]), environment=Conversation(generate, end)).final_text == expected


@pytest.mark.parametrize("text", [None, 7, b"bytes"])
def test_a_tool_whose_answer_is_no_text_is_named(text: Any) -> None:
    with pytest.raises(TypeError, match=r"the tool 'code_interpreter' answered with .*; its text must be a str"):
        play(Engine(*CALLS), tool=Tool(ToolResult(text)))


def test_a_message_with_half_a_character_is_tokenized() -> None:
    template = MessageTemplate(tiny_tokenizer())
    assert template.encode([Message("user", "half \ud83d")]) == template.encode([Message("user", "half \ufffd")])
