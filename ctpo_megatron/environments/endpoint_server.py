"""The HTTP server of an engine process: its engine as a model behind OpenAI's API, on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ctpo_megatron.base.extensions import shown
from ctpo_megatron.environments.chat_api import ChatRequest, RefusedRequest, completion, models, over_budget
from ctpo_megatron.environments.conversation import Answer, Conversation
from ctpo_megatron.environments.episode import EpisodeOver
from ctpo_megatron.environments.tokenizer import TokenizerError
from ctpo_sandbox.front import Guard, RequestRule, configured, is_loopback, listen, url_of

HOST = "127.0.0.1"
MAX_BODY, MOST_CONNECTIONS = 16 << 20, 4096
_LISTENING_S, _CLOSING_S, _KEEP_ALIVE_S = 30.0, 5.0, 60
_PAUSES, _PAUSE_S = 3, 0.001
"""For the event loop to see that a client has closed the connection: it takes some rounds of the loop."""
_NO_RETRY = {"x-should-retry": "false"}
"""For OpenAI's clients, which would repeat a request that has failed: the conversation is over then."""

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has closed the connection before the answer was complete."""


class OpenConversation:
    """A conversation that the server answers, its token, and what its calls failed with, once one has."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation, self.token = conversation, secrets.token_urlsafe(32)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Task[Any]] = set()

    def fail(self, error: BaseException) -> None:
        """The episode fails, whatever the agent makes of it."""
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


class EndpointServer:
    """`POST /v1/chat/completions` and `GET /v1/models` for the agents of this process. The token names a conversation.

    It ends with the event loop that it was started in, or with `aclose`.
    """

    def __init__(self) -> None:
        self._open: dict[str, OpenConversation] = {}
        self._listener = listen(HOST, 0)
        routes = [
            Route("/v1/chat/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        handlers: dict[Any, Callable[[Request, Exception], Awaitable[JSONResponse]]] = {
            RefusedRequest: _refused,
            HTTPException: _not_served,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        rule = RequestRule(("GET", "POST"), is_loopback, advice="use the agent's base_url")
        self._server = _QuietServer(
            configured(
                Guard(app, rule, MAX_BODY),
                MOST_CONNECTIONS,
                log_level="warning",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Base of the API, as OpenAI's clients take it."""
        return f"{url_of(self._listener)}/v1"

    async def start(self) -> None:
        """Returns when it listens. Raises RuntimeError when it does not within half a minute."""
        _without_proxy()
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._listener]))
        until = asyncio.get_running_loop().time() + _LISTENING_S
        while not self._server.started:
            self.check()
            if asyncio.get_running_loop().time() > until:
                raise RuntimeError(f"the endpoint for agents does not listen after {_LISTENING_S:g} s")
            await asyncio.sleep(0.01)

    def check(self) -> None:
        """Raises RuntimeError when it has ended."""
        if self._serving is None or self._serving.done():
            why = self._serving and not self._serving.cancelled() and self._serving.exception()
            raise RuntimeError(f"the endpoint for agents does not serve{f': {shown(why)}' if why else ''}")

    async def aclose(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=_CLOSING_S)
        self._listener.close()

    @asynccontextmanager
    async def opened(self, conversation: Conversation) -> AsyncIterator[OpenConversation]:
        """Answer a conversation within the context; afterwards its token is refused.

        Raises TimeoutError when a call does not end, unless the context raises.
        """
        opened = OpenConversation(conversation)
        self._open[opened.token] = opened
        try:
            try:
                yield opened
            finally:
                del self._open[opened.token]
        except BaseException:
            try:
                await opened.close()
            except TimeoutError as late:
                log.warning("%s", late)
            raise
        await opened.close()

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


class _QuietServer(uvicorn.Server):
    """Leaves the signals of the process alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RefusedRequest)
    return JSONResponse(error.body(), error.status, _NO_RETRY)


async def _not_served(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RefusedRequest(message, status=error.status_code)
    return JSONResponse(refusal.body(), error.status_code, {**(error.headers or {}), **_NO_RETRY})


def _without_proxy() -> None:
    """Have HTTP clients of this process reach loopback without the proxy that the environment may name."""
    given = {name: os.environ[name] for name in ("no_proxy", "NO_PROXY") if name in os.environ}
    for name in ("NO_PROXY", "no_proxy"):
        # The one that is not set begins as the other: clients prefer the lower-case name.
        hosts = [host for host in given.get(name, next(iter(given.values()), "")).split(",") if host]
        if HOST not in hosts and hosts != ["*"]:
            hosts.append(HOST)
        os.environ[name] = ",".join(hosts)
