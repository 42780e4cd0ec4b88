"""Agents of one's own: a user's function holds the conversation, and asks the engine over OpenAI's API on loopback."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ctpo_megatron.base.extensions import ExtensionError, called, load, shown
from ctpo_megatron.base.text import say
from ctpo_megatron.config import EndpointConfig, Extension
from ctpo_megatron.environments.chat_api import MODEL, ChatRequest, RefusedRequest, completion, models, over_budget
from ctpo_megatron.environments.conversation import Answer, Conversation
from ctpo_megatron.environments.episode import Episode, EpisodeOver
from ctpo_megatron.environments.protocol import Schema, ToolUnavailable
from ctpo_megatron.environments.tokenizer import TokenizerError
from ctpo_sandbox.front import Guard, RequestRule, configured, is_loopback, listen, url_of

HOST = "127.0.0.1"
MAX_BODY, MOST_CONNECTIONS = 16 << 20, 4096
_CLOSING_S, _KEEP_ALIVE_S = 5.0, 60
_PAUSES, _PAUSE_S = 3, 0.001
"""For the event loop to see that a client has closed the connection: it takes some rounds of the loop."""
_NO_RETRY = {"x-should-retry": "false"}
"""For OpenAI's clients, which would repeat a request that has failed: the conversation is over then."""

_ENDING_S = 5.0
"""For a cancelled agent to end."""
_TRUTHS = ("answer", "ground_truth", "solution", "reward_model")
"""Columns of a row that may hold what the agent is to find."""

log = logging.getLogger(__name__)


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
    """Each episode is one call of the user's agent, with a token of its own to ask the model.

    What the agent returns is the final text; None: what the model said last. It ends with "length", "max_turns" or
    "tool_budget" when a budget was exhausted, with "length" also when the last answer was cut. A server answers
    `POST /v1/chat/completions` and `GET /v1/models` from the first episode on; it ends with the event loop.
    """

    _server: uvicorn.Server
    _listener: socket.socket
    """Set with `_serving`."""

    def __init__(self, config: EndpointConfig, offered: Sequence[Schema]) -> None:
        """offered: as of `offered_schemas`. Raises ExtensionError."""
        if config.agent is None:
            raise ExtensionError("rollout.endpoint.agent: name the function that runs episodes, package.module:name")
        self._name, self._timeout_s = config.agent.name, config.timeout_s
        self._agent, self._offered = _made(config.agent), offered
        self._open: dict[str, OpenConversation] = {}
        self._serving: asyncio.Task[None] | None = None

    async def run(self, episode: Episode) -> None:
        """See Environment. Raises what the agent raises, and TimeoutError when it has not ended in time."""
        serving = self._served()
        conversation = Conversation(episode, self._offered)
        async with self._opened(conversation) as opened:
            returned, error = await self._outcome(self._begun(self._task(episode, opened)), opened, serving)
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
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=_CLOSING_S)
            self._listener.close()

    def _served(self) -> asyncio.Task[None]:
        """Serve from now on. Requests wait in the socket until the server has started."""
        if self._serving is None:
            _without_proxy()
            routes = [
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
            ]
            app = Starlette(routes=routes, exception_handlers={RefusedRequest: _refused, HTTPException: _refused})
            rule = RequestRule(("GET", "POST"), is_loopback, advice="use the agent's base_url")
            limits = {"timeout_keep_alive": _KEEP_ALIVE_S, "timeout_graceful_shutdown": 1}
            settings = configured(Guard(app, rule, MAX_BODY), MOST_CONNECTIONS, log_level="warning", **limits)
            # An engine's event loop is not in the main thread, so that uvicorn leaves signals alone.
            self._server, self._listener = uvicorn.Server(settings), listen(HOST, 0)
            self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        return self._serving

    @asynccontextmanager
    async def _opened(self, conversation: Conversation) -> AsyncIterator[OpenConversation]:
        """Answer a conversation within the context; afterwards its token is refused.

        Raises TimeoutError when a call does not end, unless the context raises.
        """
        opened = OpenConversation(conversation)
        self._open[opened.token] = opened
        raised = True
        try:
            yield opened
            raised = False
        finally:
            del self._open[opened.token]
            try:
                await opened.close()
            except TimeoutError as late:
                if not raised:
                    raise
                log.warning("%s", late)

    def _named(self, request: Request) -> OpenConversation:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        opened = self._open.get(token.strip()) if scheme.lower() == "bearer" else None
        if opened is None:
            message = "no conversation has this API key: use the agent's api_key, while the agent runs"
            raise RefusedRequest(message, status=401, code="invalid_api_key")
        return opened

    async def _completions(self, request: Request) -> _Completion:
        self._named(request)
        body = await request.body()
        opened = self._named(request)  # again: it may have ended while the body was read
        try:
            given = json.loads(body)
            json.dumps(given, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or half a character
            raise RefusedRequest(f"the body is no JSON: {error!s:.200}") from error
        return _Completion(opened, ChatRequest.of(given, opened.conversation.episode.limits.sampling))

    async def _models(self, request: Request) -> JSONResponse:
        self._named(request)
        return JSONResponse(models())

    def _task(self, episode: Episode, opened: OpenConversation) -> AgentTask:
        prompt = episode.prompt
        row = {name: value for name, value in prompt.extra.items() if name not in _TRUTHS}
        return AgentTask(
            base_url=f"{url_of(self._listener)}/v1",
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
        ended = Future[Any]()
        ended.set_running_or_notify_cancel()  # afterwards only the thread settles it
        threading.Thread(target=_called, args=(self._agent, task, ended), name="agent", daemon=True).start()
        return asyncio.wrap_future(ended)

    async def _outcome(
        self, agent: asyncio.Future[Any], opened: OpenConversation, serving: asyncio.Task[None]
    ) -> tuple[str | None, BaseException | None]:
        """What the agent returned or raised. Raises what a call failed with, TimeoutError, and RuntimeError."""
        try:
            ends = {agent, opened.failure, serving}
            await asyncio.wait(ends, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if opened.failure.done():
                opened.failure.result()
            if serving.done():
                why = not serving.cancelled() and serving.exception()
                raise RuntimeError(f"the endpoint for agents does not serve{f': {shown(why)}' if why else ''}")
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


def _called(agent: Callable[[AgentTask], Any], task: AgentTask, ended: Future[Any]) -> None:
    """In a thread: call the agent, and settle `ended` with what it returns or raises."""
    try:
        with called("the agent"):
            returned = agent(task)
    except (StopIteration, CancelledError) as error:  # asyncio would refuse the one, and take the other for its own
        ended.set_exception(ExtensionError(f"the agent raised {shown(error)}"))
    except Exception as error:
        ended.set_exception(error)
    else:
        ended.set_result(returned)


class ClientGone(Exception):
    """The client has closed the connection before the answer was complete."""


class OpenConversation:
    """A conversation that the server answers, its token, and what its calls failed with, once one has."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.token = conversation, secrets.token_urlsafe(32)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Task[Any]] = set()

    def fail(self, error: BaseException) -> None:
        """Fail the episode, whatever the agent does next."""
        if not self.failure.done():
            self.failure.set_exception(error)

    async def answer(
        self, request: ChatRequest, gone: asyncio.Future[None], deliver: Callable[[Answer], Awaitable[None]]
    ) -> None:
        """Have the model answer. gone: set when the client is; then the call is cancelled and nothing remains of it.

        deliver: writes the answer, or raises ClientGone. Raises RefusedRequest.
        """
        call = asyncio.ensure_future(
            self.conversation.answer(
                request.messages, request.tools, limit=request.limit, stop=request.stop, deliver=deliver
            )
        )
        self._calls.add(call)
        call.add_done_callback(self._ended)
        await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            return
        if call.cancelled():
            raise RefusedRequest("the conversation has ended", status=401, code="invalid_api_key")
        match call.exception():
            case None | ClientGone():
                return
            case EpisodeOver() as over:
                raise over_budget(over)
            case TokenizerError() as error:
                raise RefusedRequest(f"messages: {error}", param="messages") from error
            case error:
                raise RefusedRequest(f"the engine failed: {shown(error)}", status=500) from error

    def _ended(self, call: asyncio.Task[Any]) -> None:
        self._calls.discard(call)
        error = None if call.cancelled() else call.exception()
        if error is not None and not isinstance(error, EpisodeOver | TokenizerError | ClientGone):
            self.fail(error)

    async def close(self) -> None:
        """End the calls that are still answered, and wait until they have taken back what they added.

        Raises TimeoutError when one does not end.
        """
        try:
            for call in self._calls:
                call.cancel()
            late = (await asyncio.wait(self._calls, timeout=_CLOSING_S))[1] if self._calls else ()
            if late:
                raise TimeoutError(f"{len(late)} calls of the model have not ended {_CLOSING_S:g} s after their agent")
        finally:
            if self.failure.done():
                self.failure.exception()  # it was raised, or the episode had ended before
            self.failure.cancel()


class _Completion:
    """The response to a request, which the model answers while the client is there.

    Its last byte is written when the client still reads behind all others. Only then does the answer count, and no
    client has the whole of one that does not.
    """

    def __init__(self, opened: OpenConversation, request: ChatRequest) -> None:
        self._opened, self._request, self._started = opened, request, False

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await self._opened.answer(self._request, gone, partial(self._write, gone, send))
        except RefusedRequest:
            if not self._started:  # else the connection ends with half an answer
                raise
        finally:
            gone.cancel()

    async def _write(self, gone: asyncio.Future[None], send: Send, answer: Answer) -> None:
        """Raises ClientGone."""
        whole = JSONResponse(completion(answer))
        self._started = True
        await send({"type": "http.response.start", "status": whole.status_code, "headers": whole.raw_headers})
        await send({"type": "http.response.body", "body": whole.body[:-1], "more_body": True})
        for _ in range(_PAUSES):
            await asyncio.wait([gone], timeout=_PAUSE_S)
        if not gone.done():
            await send({"type": "http.response.body", "body": whole.body[-1:]})
        if gone.done():
            raise ClientGone


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection, after its whole body was received."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refused(request: Request, error: Exception) -> JSONResponse:
    """Answer in OpenAI's shape, also where starlette knows no such path or method."""
    headers = getattr(error, "headers", None) or {}
    if isinstance(error, HTTPException):
        error = RefusedRequest(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    assert isinstance(error, RefusedRequest)
    return JSONResponse(error.body(), error.status, {**headers, **_NO_RETRY})


def _without_proxy() -> None:
    """Have HTTP clients of this process reach loopback without the proxy that the environment may name."""
    given = {name: os.environ[name] for name in ("no_proxy", "NO_PROXY") if name in os.environ}
    for name in ("NO_PROXY", "no_proxy"):
        # The one that is not set begins as the other: clients prefer the lower-case name.
        hosts = [host for host in given.get(name, next(iter(given.values()), "")).split(",") if host]
        if HOST not in hosts and hosts != ["*"]:
            hosts.append(HOST)
        os.environ[name] = ",".join(hosts)
