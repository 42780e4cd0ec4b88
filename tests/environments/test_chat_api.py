"""The endpoint of agents as clients see it: what is refused, what is honoured, and who is let in."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from ctpo_megatron.environments import AgentTask, Sampling
from tests.environments.endpoint_stand import QUESTION, Engine, Stand, asked, client_of, played, sequences
from tests.support.deadlines import scaled


@asynccontextmanager
async def an_open_conversation(*texts: str) -> AsyncIterator[AgentTask]:
    """The task of an agent that waits until the context ends."""
    begun: asyncio.Future[AgentTask] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def agent(task: AgentTask) -> None:
        begun.set_result(task)
        await over.wait()
        await asked(task, task.messages)

    stand = Stand(Engine(*texts, "end"), agent)
    running = asyncio.ensure_future(stand.trajectory())
    try:
        yield await asyncio.wait_for(begun, scaled(20))
    finally:
        over.set()
        await running
        await stand.environment.aclose()


def of_parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


PART, ONLY = "message 0 has a part", "this trainer supports parts of type 'text' alone, no images,"
SHOWN = {"role": "tool", "content": "1"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 0.2}, "temperature", "temperature is 0.2, and the run samples with 1: leave it out"),
    ({"top_p": 0.5}, "top_p", "the run samples with 1"),
    ({"top_k": 5}, "top_k", "the run samples with 0"),
    ({"n": 2}, "n", "n is 2; leave it out, or give 1"),
    ({"stream": True}, "stream", "stream is True; leave it out, or give false"),
    ({"logprobs": True}, "logprobs", "give false"),
    ({"seed": 3}, "seed", "the run's seeds decide"),
    ({"presence_penalty": 0.5}, "presence_penalty", "give 0"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "give {}"),
    ({"tool_choice": "required"}, "tool_choice", 'give "auto" or "none"'),
    ({"response_format": {"type": "json_object"}}, "response_format", "leave it out"),
    ({"chat_template_kwargs": {}}, "chat_template_kwargs", "chat_template_kwargs is not supported"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; give a whole number"),
    ({"stop": [""]}, "stop", "give a text or a list of texts"),
    ({"tools": [{"name": "f"}]}, "tools", "tool 0 is no schema"),
    ({"messages": []}, "messages", "expected a non-empty list"),
    ({"n": True}, "n", "n is True; leave it out, or give 1"),
    ({"stream": 0}, "stream", "stream is 0; leave it out, or give false"),
    ({"temperature": True}, "temperature", "temperature is True, and the run samples with 1"),
    ({"presence_penalty": False}, "presence_penalty", "give 0"),
    ({"stop": ["x"] * 10_000}, "stop", "stop has 10,000 texts; give at most 16"),
    (of_parts({"type": "text", "text": "x"}, {"type": "image_url"}), "messages", f"{PART} of type 'image_url': {ONLY}"),
    (of_parts({"type": "input_audio", "text": "x"}), "messages", "'input_audio'"),
    (of_parts("x"), "messages", f"{PART} without a type: this"),
    (of_parts({"type": "text"}), "messages", f"{PART} of type 'text', and no text: this trainer"),
    ({"messages": [*QUESTION, SHOWN]}, "messages", "message 1 (tool) answers no call: give the `tool_call_id` of one"),
    ({"messages": [*QUESTION, {**SHOWN, "tool_call_id": "7"}]}, "messages", "message 1 (tool) answers no call"),
    ({"messages": [*QUESTION, CALLING, {**SHOWN, "tool_call_id": "7"}]}, "messages", "message 2 answers the call '7'"),
    ({"messages": [SHOWN, CALLING]}, "messages", "message 0 (tool) answers no call"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "has role 'robot'"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "", "the body is no JSON"),
]


def test_what_cannot_be_honoured_is_refused_with_its_field() -> None:
    async def run() -> None:
        async with an_open_conversation() as task, httpx.AsyncClient() as client:
            headers = {"authorization": f"Bearer {task.api_key}", "content-type": "application/json"}
            for fields, param, message in REFUSED:
                body = json.dumps({"model": task.model, "messages": QUESTION} | fields)
                answer = await client.post(f"{task.base_url}/chat/completions", content=body, headers=headers)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
                assert (error["param"] or "") == param and message in error["message"], error
            async with client_of(task) as stock:
                with pytest.raises(openai.NotFoundError, match="the one that is trained is 'policy'"):
                    await stock.chat.completions.create(model="gpt", messages=QUESTION)  # type: ignore[arg-type]
                assert [model.id async for model in stock.models.list()] == ["policy"]

    asyncio.run(run())


def test_what_changes_nothing_is_honoured() -> None:
    async def agent(task: AgentTask) -> None:
        options = {"temperature": 0.7, "top_p": 0.9, "n": 1, "user": "me", "stream": False, "parallel_tool_calls": True}
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        await asked(task, [{"role": "developer", "content": parts}], stop=["x"] * 16, presence_penalty=0.0, **options)
        await asked(task, [*QUESTION, CALLING, {**SHOWN, "tool_call_id": "1"}])
        await asked(task, [*QUESTION, CALLING, SHOWN])  # as data files may have it

    trajectory = played(Engine("one", "two", "three"), agent, sampling=Sampling(0.7, 0.9, 0))
    assert sequences(trajectory)[0].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_who_is_let_in() -> None:
    async def run() -> None:
        async with an_open_conversation("one") as task, httpx.AsyncClient() as client:
            url, key = f"{task.base_url}/chat/completions", {"authorization": f"Bearer {task.api_key}"}
            body = json.dumps({"messages": QUESTION})
            as_json = key | {"content-type": "application/json"}
            wanted = {
                401: as_json | {"authorization": "Bearer other"},
                403: as_json | {"origin": "http://evil.example"},
                415: key | {"content-type": "text/plain"},
                421: as_json | {"host": "evil.example"},
            }
            for status, headers in wanted.items():
                assert (await client.post(url, content=body, headers=headers)).status_code == status
            crossed = as_json | {"sec-fetch-site": "cross-site"}
            assert (await client.post(url, content=body, headers=crossed)).status_code == 403
            assert (await client.post(url, content=" " * (17 << 20), headers=as_json)).status_code == 413
            assert (await client.get(task.base_url.removesuffix("/v1"), headers=key)).status_code == 404
            assert (await client.get(f"{task.base_url}/models")).status_code == 401
            assert (await client.post(url, content=body, headers=as_json)).status_code == 200
            host, port = task.base_url.removeprefix("http://").removesuffix("/v1").split(":")
            assert host == "127.0.0.1"
            with pytest.raises(OSError):  # another address of this machine
                socket.create_connection(("127.0.0.2", int(port)), timeout=5).close()

    asyncio.run(run())
