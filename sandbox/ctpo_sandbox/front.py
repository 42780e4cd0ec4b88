"""What stands before the application of every HTTP server of ours: who may ask what, sizes, times and numbers."""

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ctpo_sandbox.timeouts import (
    BODY_TIMEOUT_S,
    HEAD_TIMEOUT_S,
    REPLY_TIMEOUT_S,
)
from ctpo_sandbox.variables import FAULT_HEADER, TOKEN

OPEN_PATHS = ("/live", "/ready")
"""Paths for health checks: they answer only yes or no, so they need no token."""

MAX_UNREAD_BYTES = 256 << 20
"""Of all answers together that clients do not read; beyond it the connection that waits longest is closed."""

_BACKLOG = 2048
_log = logging.getLogger("ctpo_sandbox.front")
_SLOW = "the request body did not come within {:g} s"


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with deadlines for the head of a request and for the reading of an answer, and a bounded
    number of connections. A client that closes its side of a connection is gone.
    """

    _unread: ClassVar[dict["HttpProtocol", asyncio.TimerHandle]] = {}
    """Connections whose client does not read, the longest first; each is closed by its timer."""

    _head_deadline: asyncio.TimerHandle | None = None
    _since = 0.0
    """When the latest request was complete, or the connection made."""

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever is left to write is unread
        self._since = self.loop.time()
        self._expect_head()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._expect_head()
        super().data_received(data)
        if not self._idle:
            self._since = self.loop.time()
            self._stop_expecting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread[self] = self.loop.call_later(REPLY_TIMEOUT_S, self.transport.abort)
        sizes = {waiting: waiting.transport.get_write_buffer_size() for waiting in self._unread}
        held = sum(sizes.values())
        for waiting, size in sizes.items():
            if held <= MAX_UNREAD_BYTES:
                break
            waiting._is_read()
            waiting.transport.abort()
            held -= size

    def resume_writing(self) -> None:
        super().resume_writing()
        self._is_read()

    def _is_read(self) -> None:
        if (deadline := self._unread.pop(self, None)) is not None:
            deadline.cancel()

    def _make_room(self) -> None:
        """If there are too many connections, close the one that has asked for nothing for the longest time."""
        most = self.config.limit_concurrency
        if most is None or len(self.connections) < most:
            return
        there = [each for each in self.connections if not each.transport.is_closing()]
        if len(there) >= most:
            min((each for each in there if each._idle), key=lambda each: each._since).transport.abort()

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


@dataclass(frozen=True)
class RequestRule:
    """What a server demands of every request, before anything is done for it.

    methods: the ones there are. content_type: what a POST must hold. answers_to: whether a value of Host, with or
    without port, is the server's; None: any is. token: a bearer token that must come along; None: without.
    advice: what a client with another Host or without the token may do.

    A server on loopback is within reach of web pages. Against DNS rebinding its Host header must be a name of its own.
    A browser also sends some requests across origins without asking (the CORS-safelisted ones of the Fetch standard),
    so another origin and other content types are refused.
    """

    methods: tuple[str, ...]
    answers_to: Callable[[str], bool] | None
    token: str | None = None
    content_type: str = "application/json"
    advice: str = "use the address that the server printed"

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        """Status and reason, or None for a request that may pass.

        401: no token. 400: no Host, or several. 421: another's Host. 403: a page of another origin. 405, 415.
        """
        given = headers.get("authorization", "").encode("latin-1")
        if self.token is not None and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            return 401, f"a bearer token is needed; {self.advice}"
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return 400, f"the request has {len(hosts)} Host headers, not one"
        if self.answers_to is not None and not self.answers_to(hosts[0]):
            return 421, f"{hosts[0][:80]!a} is no name of this server; {self.advice}"
        if _is_cross_origin(headers, hosts[0]):
            return 403, "requests of web pages from another origin are refused: type the address, or paste it"
        if method not in self.methods:
            return 405, f"the method must be {' or '.join(self.methods)}, not {method[:80]!a}"
        content_type = headers.get("content-type", "")
        if method == "POST" and content_type.partition(";")[0].strip().lower() != self.content_type:
            return 415, f"the content type must be {self.content_type}, not {content_type[:80]!a}"
        return None


class Guard:
    """Refuses requests before they are all in memory: by a rule, too large (413), or too slow (408).

    rejected: called with the status of each that the rule refuses.
    """

    def __init__(
        self, app: ASGIApp, rule: RequestRule, max_bytes: int, rejected: Callable[[int], None] = lambda status: None
    ) -> None:
        self._app, self._rule, self._max_bytes, self._rejected = app, rule, max_bytes, rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if problem := self._rule.refusal(scope["method"], Headers(scope=scope)):
            status, detail = problem
            self._rejected(status)
            headers = {"allow": ", ".join(self._rule.methods)} if status == 405 else None
            return await JSONResponse({"detail": detail}, status, headers)(scope, receive, send)
        try:
            await self._app(scope, self._bounded(receive), send)
        except ClientDisconnect:
            _log.debug("a client has closed the connection within its request")

    def _bounded(self, receive: Receive) -> Receive:
        deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        size, complete = 0, False

        async def bounded() -> Message:
            nonlocal size, complete
            if complete:  # the next message is the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, _SLOW.format(BODY_TIMEOUT_S), headers={"connection": "close"}) from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise HTTPException(413, f"the request body exceeds {self._max_bytes} bytes")
            return message

        return bounded


class Gate:
    """The guard of the sandbox. It answers 503 for any exception of the application."""

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: int, rejected: Callable[[int], None]) -> None:
        # A server with a token may be off loopback, under names that it does not know.
        answers_to = is_loopback if token is None else None
        rule = RequestRule(("GET", "HEAD", "POST"), answers_to, token, advice=f"set {TOKEN}")
        self._app, self._rejected = app, rejected
        self._guarded = Guard(app, rule, max_bytes, rejected)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            is_open = scope["type"] == "http" and scope["path"] in OPEN_PATHS
            await (self._app if is_open else self._guarded)(scope, receive, sending)
        except Exception as error:  # a defect of ours: the client may try again, unless it has half of an answer
            _log.exception("no answer to a request")
            if started:
                raise
            self._rejected(503)
            detail = f"the sandbox failed: {error!a}"[:500]
            refusal = JSONResponse({"detail": detail}, status_code=503, headers={FAULT_HEADER: "defect"})
            await refusal(scope, receive, send)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises OSError."""
    families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # asyncio sets this only on sockets created with an explicit protocol; without it every reply waits 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """`http://HOST:PORT` of what `listen` returns."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configured(app: ASGIApp, most_connections: int, **more: Any) -> uvicorn.Config:
    """Return the configuration that all our servers share. more: other arguments of `uvicorn.Config`.

    For moments there are three times as many connections: the process must be allowed that many open files.
    """
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=most_connections + 1,  # of that many uvicorn refuses the last
        backlog=min(_BACKLOG, most_connections),  # asyncio accepts this number before it refuses any
        **more,
    )


def _is_cross_origin(headers: Headers, host: str) -> bool:
    """Whether a browser sent the request for a page that does not come from `host` (Fetch standard, Fetch Metadata)."""
    origins = {origin.lower() for origin in headers.getlist("origin")}
    sites = set(headers.getlist("sec-fetch-site"))
    return bool(origins - {f"http://{host.lower()}", f"https://{host.lower()}"} or sites - {"same-origin", "none"})


@lru_cache
def is_loopback(host: str) -> bool:
    """Return whether a Host header, with or without port, names loopback."""
    parts = re.fullmatch(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?", host, re.ASCII)
    if parts is None:
        return False
    name = parts["name"] if parts["v6"] is None else parts["v6"]
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
