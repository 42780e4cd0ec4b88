"""The environment of agents of one's own: a user's function holds the conversation, over OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ctpo_megatron.base.extensions import ExtensionError, called, load, shown
from ctpo_megatron.base.printable import say
from ctpo_megatron.config import EndpointConfig, Extension
from ctpo_megatron.environments.chat_api import MODEL, over_budget
from ctpo_megatron.environments.conversation import Conversation
from ctpo_megatron.environments.endpoint_server import EndpointServer, OpenConversation
from ctpo_megatron.environments.episode import Episode
from ctpo_megatron.environments.protocol import Schema, ToolUnavailable

_ENDING_S = 5.0
"""For a cancelled agent to end."""
_TRUTHS = ("answer", "ground_truth", "solution", "reward_model")
"""Columns of a row that may hold what the agent is to find."""


@dataclass(frozen=True)
class AgentTask:
    """What an agent is given. It asks the model at `base_url` with `api_key`, which names its conversation.

    messages: of the prompt, the run's system prompt included. tools: schemas of the run's. row: the other columns of
    the prompt's row, its `id` and `data_source`, without a ground truth. seed: of this episode alone.
    """

    base_url: str
    api_key: str = field(repr=False)
    model: str
    messages: list[dict[str, Any]]
    tools: list[Schema]
    row: Mapping[str, Any]
    seed: int
    _opened: OpenConversation = field(repr=False)
    _loop: asyncio.AbstractEventLoop = field(repr=False)

    async def call_tool(self, call: Any) -> str:
        """Run a call with the tools of the run (`rollout.tools`), and return what the model is to be shown.

        call: one of the `tool_calls` of an answer, as OpenAI's client or JSON has it. Raises ToolUnavailable.
        """
        made = call if isinstance(call, Mapping) else call.model_dump()
        running = self._run(str(made["id"]), made["function"]["name"], made["function"]["arguments"])
        if asyncio.get_running_loop() is self._loop:
            return await running
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(running, self._loop))

    async def _run(self, id: str, name: str, arguments: str) -> str:
        try:
            return await self._opened.conversation.call_tool(id, name, json.loads(arguments))
        except ToolUnavailable as error:
            self._opened.fail(error)
            raise


class EndpointEnvironment:
    """Each episode is one call of the user's agent, with a server and a token of its own to ask the model.

    What the agent returns is the final text; None: what the model said last. It ends with "length", "max_turns" or
    "tool_budget" when a budget was exhausted, with "length" also when the last answer was cut.
    """

    def __init__(self, config: EndpointConfig, offered: Sequence[Schema]) -> None:
        """offered: `factory.offered_schemas`. Raises ExtensionError."""
        if config.agent is None:
            raise ExtensionError("rollout.endpoint.agent: name the function that runs episodes, package.module:name")
        self._name, self._timeout_s = config.agent.name, config.timeout_s
        self._agent, self._offered = _made(config.agent), offered
        self._server: EndpointServer | None = None
        self._starting = asyncio.Lock()

    async def run(self, episode: Episode) -> None:
        """See Environment. Raises what the agent raises, and TimeoutError when it has not ended in time."""
        server = await self._started()
        conversation = Conversation(episode, self._offered)
        async with server.opened(conversation) as opened:
            returned, error = await self._outcome(self._begun(self._task(episode, server, opened)), opened)
            if error is not None and conversation.over is None:
                raise error
        last = conversation.last
        if last is None:
            why = "" if conversation.over is None else f": {over_budget(conversation.over)}"
            raise RuntimeError(f"the agent {self._name} ended without an answer of the model{why}")
        if not isinstance(returned, str | None):
            kind = type(returned).__name__
            raise TypeError(f"the agent {self._name} returned a {kind}; return the final answer as a text, or None")
        if returned is None:
            returned = last.turn.text if last.turn.complete or not last.calls else ""
        if conversation.over is not None:
            episode.finish("" if error is not None else returned, conversation.over.reason)
        else:
            episode.finish(returned, "answer" if last.turn.complete else "length")

    async def aclose(self) -> None:
        """Stop the server."""
        if self._server is not None:
            await self._server.aclose()

    async def _started(self) -> EndpointServer:
        async with self._starting:
            if self._server is None:
                server = EndpointServer()
                try:
                    await server.start()
                except BaseException:
                    await server.aclose()
                    raise
                self._server = server
        self._server.check()
        return self._server

    def _task(self, episode: Episode, server: EndpointServer, opened: OpenConversation) -> AgentTask:
        prompt = episode.prompt
        row = {name: value for name, value in prompt.extra.items() if name not in _TRUTHS}
        return AgentTask(
            base_url=server.url,
            api_key=opened.token,
            model=MODEL,
            messages=[dict(message) for message in prompt.messages],
            tools=[dict(schema) for schema in episode.tools.schemas],
            row=row | {"id": prompt.id, "data_source": prompt.data_source},
            seed=episode.seed,
            _opened=opened,
            _loop=asyncio.get_running_loop(),
        )

    def _begun(self, task: AgentTask) -> asyncio.Future[Any]:
        """The agent at work: in a task of this loop, or a plain function in a thread of its own."""
        if _is_async(self._agent):
            return asyncio.ensure_future(_awaited(self._agent, task))
        ended = asyncio.get_running_loop().create_future()
        threading.Thread(target=_called, args=(self._agent, task, ended), name="agent", daemon=True).start()
        return ended

    async def _outcome(
        self, agent: asyncio.Future[Any], opened: OpenConversation
    ) -> tuple[str | None, BaseException | None]:
        """What the agent returned or raised. Raises what a call failed with, and TimeoutError."""
        try:
            await asyncio.wait({agent, opened.failure}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if opened.failure.done():
                opened.failure.result()
            if not agent.done():
                raise TimeoutError(
                    f"the agent {self._name} has not ended after {self._timeout_s:g} s (rollout.endpoint.timeout_s)"
                )
            error = agent.exception()
            return (None, error) if error is not None else (agent.result(), None)
        finally:
            if not agent.done():
                agent.cancel()
                await asyncio.wait({agent}, timeout=_ENDING_S)
                if not agent.done():
                    say(f"the agent {self._name} was cancelled, and continues after {_ENDING_S:g} s", error=True)


def _made(agent: Extension) -> Callable[[AgentTask], Any]:
    found = load(agent.name)
    if not isinstance(found, type):
        return partial(found, **agent.arguments)
    with called(agent.name):
        made: Callable[[AgentTask], Any] = found(**agent.arguments)
    return made


def _is_async(agent: Callable[[AgentTask], Any]) -> bool:
    inner = agent.func if isinstance(agent, partial) else agent
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


async def _awaited(agent: Callable[[AgentTask], Any], task: AgentTask) -> Any:
    with called("the agent"):
        return await agent(task)


def _called(agent: Callable[[AgentTask], Any], task: AgentTask, ended: asyncio.Future[Any]) -> None:
    """In a thread: call the agent, and deliver what it returns or raises."""
    try:
        with called("the agent"):
            settle: Callable[[], None] = partial(_settle, ended, agent(task), None)
    except Exception as error:
        if isinstance(error, StopIteration):  # which no future takes
            error = ExtensionError(f"the agent raised {shown(error)}")
        settle = partial(_settle, ended, None, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed, and the episode has ended with it
        ended.get_loop().call_soon_threadsafe(settle)


def _settle(ended: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if ended.done():  # the episode had ended before
        return
    if error is None:
        ended.set_result(value)
    else:
        ended.set_exception(error)
