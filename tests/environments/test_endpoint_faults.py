"""Agents that repeat the model's own words, or meet half a character."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

import pytest

from ctpo_megatron.environments import endpoint_server
from ctpo_megatron.environments.endpoint import AgentTask
from ctpo_megatron.environments.endpoint_server import _without_proxy
from ctpo_megatron.environments.episode import ModelTurn
from tests.environments.endpoint_stand import Engine, asked, played, sampled, solve


def test_a_history_that_ends_with_the_models_own_answer_is_rendered() -> None:
    async def again(task: AgentTask) -> None:
        first = await asked(task, task.messages)
        await asked(task, [*task.messages, first])

    trajectory = played(Engine("one", "two"), again)
    assert sampled(trajectory) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_call_with_half_a_character_stays_text() -> None:
    half = '<tool_call>{"name": "code_interpreter", "arguments": {"code": "\\ud83d"}}</tool_call>'
    trajectory = played(Engine(half), solve)
    assert [call.status for call in trajectory.tool_calls] == ["parse_error"]
    assert sampled(trajectory) == [f"{half}<|im_end|>"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("127.0.0.1", "127.0.0.1")),
        ({"NO_PROXY": "corp"}, ("corp,127.0.0.1", "corp,127.0.0.1")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, ("a,127.0.0.1", "b,127.0.0.1")),
        ({"no_proxy": "*"}, ("*", "*")),
    ],
)
def test_hosts_without_a_proxy_stay(given: dict[str, str], wanted: tuple[str, str], monkeypatch: Any) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that both are restored
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    _without_proxy()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == wanted


class Stubborn(Engine):
    """Does not end when its call is cancelled."""

    began = False

    async def __call__(self, token_ids: Sequence[int], **options: Any) -> ModelTurn:
        self.began = True
        for pause in (3600, 2):  # it is cancelled when its client is gone, and when its agent has ended
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(pause)
        await asyncio.sleep(2)
        return await super().__call__(token_ids, **options)


@pytest.mark.parametrize("fails", [True, False])
def test_a_late_call_does_not_hide_what_ended_the_agent(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint_server, "_CLOSING_S", 0.2)

    engine = Stubborn("one")

    async def ends(task: AgentTask) -> str:
        call = asyncio.create_task(asked(task, task.messages))
        while not engine.began:
            await asyncio.sleep(0.01)
        call.cancel()
        if fails:
            raise ValueError("of the agent")
        return "done"

    with pytest.raises(
        ValueError if fails else TimeoutError, match="of the agent" if fails else "1 calls of the model"
    ):
        played(engine, ends)
    assert ("1 calls of the model have not ended" in caplog.text) == fails
