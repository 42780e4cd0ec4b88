"""Admission of requests before the application: authorization, size limits and time limits."""

import asyncio
import hmac
import ipaddress
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ctpo_sandbox.timeouts import (
    BODY_TIMEOUT_S,
    HALF_CLOSE_PROBE_AGAIN_S,
    HALF_CLOSE_PROBE_S,
    HEAD_TIMEOUT_S,
    REPLY_TIMEOUT_S,
)
from ctpo_sandbox.variables import FAULT_HEADER

OPEN_PATHS = ("/live", "/ready")
"""Paths for health checks: they answer only yes or no, so they need no token."""

MAX_UNREAD_BYTES = 256 << 20
"""Of all answers together that clients do not read; beyond it the connection that waits longest is closed."""

_log = logging.getLogger("ctpo_sandbox.front")
_SLOW = "the request body did not come within {:g} s"
_INTERIM_RESPONSE = b"HTTP/1.1 102 Processing\r\n\r\n"


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with deadlines for the head of a request and for the reading of an answer, and support for
    clients that half-close.
    """

    _unread: ClassVar[dict["HttpProtocol", asyncio.TimerHandle]] = {}
    """Connections whose client does not read, the longest first; each is closed by its timer."""

    _head_deadline: asyncio.TimerHandle | None = None

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever is left to write is unread
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._expect_head()
        super().data_received(data)
        if not self._idle:
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

    def eof_received(self) -> bool:
        """Whether to keep the connection: clients that are gone and clients that wait differ only on a write."""
        if self._idle or self.cycle.scope["http_version"] != "1.1":
            return False
        self.cycle.keep_alive = False
        self._probe(HALF_CLOSE_PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        """Send an interim response, which clients ignore; if the client is gone, writing breaks the connection."""
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(_INTERIM_RESPONSE)
            self.loop.call_later(next_s, self._probe, HALF_CLOSE_PROBE_AGAIN_S)

    def _expect_head(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_expecting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


class Gate:
    """Refuses requests before they are all in memory, and answers 503 for any exception of the application.

    Refused are those without the token (401), to another host (400, 421), from a web page of another origin (403), not
    JSON (415), too large (413), or too slow (408).

    Without a token the server is on loopback, where web pages can reach it. Against DNS rebinding the Host header must
    be a loopback name. A browser also sends some requests across origins without asking (the CORS-safelisted ones of
    the Fetch standard), so another origin and any content type but JSON are refused.
    """

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: int, rejected: Callable[[int], None]) -> None:
        self._app, self._max_bytes, self._rejected = app, max_bytes, rejected
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._answer(scope, receive, sending)
        except Exception as error:  # a defect of ours: the client may try again, unless it has half of an answer
            _log.exception("no answer to a request")
            if started:
                raise
            self._rejected(503)
            detail = f"the sandbox failed: {error!a}"[:500]
            refusal = JSONResponse({"detail": detail}, status_code=503, headers={FAULT_HEADER: "defect"})
            await refusal(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if problem := self._problem(scope["method"], Headers(scope=scope)):
            status, detail = problem
            self._rejected(status)
            return await JSONResponse({"detail": detail}, status_code=status)(scope, receive, send)
        await self._app(scope, self._bounded(receive), send)

    def _problem(self, method: str, headers: Headers) -> tuple[int, str] | None:
        given = headers.get("authorization", "").encode("latin-1")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return 401, "a bearer token is needed (SANDBOX_TOKEN)"
        hosts = headers.getlist("host") or ["localhost"]
        if len(hosts) > 1:
            return 400, "the request has more than one Host header"
        if self._expected is None and not _is_loopback(hosts[0]):
            return 421, f"{hosts[0][:80]!a} is not this machine's loopback; set SANDBOX_TOKEN"
        if _is_cross_origin(headers, hosts[0]):
            return 403, "requests of web pages from another origin are refused"
        content_type = headers.get("content-type", "")
        if method == "POST" and content_type.partition(";")[0].strip().lower() != "application/json":
            return 415, f"the content type must be application/json, not {content_type[:80]!a}"
        return None

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


def _is_cross_origin(headers: Headers, host: str) -> bool:
    """Whether a browser sent the request for a page that does not come from `host` (Fetch standard, Fetch Metadata)."""
    origins = {origin.lower() for origin in headers.getlist("origin")}
    sites = set(headers.getlist("sec-fetch-site"))
    return bool(origins - {f"http://{host.lower()}", f"https://{host.lower()}"} or sites - {"same-origin", "none"})


@lru_cache
def _is_loopback(host: str) -> bool:
    """Whether a Host header, with or without port, names loopback."""
    parts = re.fullmatch(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(?::[0-9]*)?", host, re.ASCII)
    if parts is None:
        return False
    name = parts["name"] if parts["v6"] is None else parts["v6"]
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
