"""Admission of requests before the application: authorization, size limits and time limits."""

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ctpo_sandbox.timeouts import BODY_TIMEOUT_S, HALF_CLOSE_PROBE_AGAIN_S, HALF_CLOSE_PROBE_S, HEAD_TIMEOUT_S

OPEN_PATHS = ("/live", "/ready")
"""Paths for health checks: they answer only yes or no, so they need no token."""

_SLOW = "the request body did not come within {:g} s"
_INTERIM_RESPONSE = b"HTTP/1.1 102 Processing\r\n\r\n"


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with a deadline for the head of a request, and support for clients that half-close."""

    _head_deadline: asyncio.TimerHandle | None = None

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._expect_head()
        super().data_received(data)
        if not self._idle:
            self._stop_expecting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        super().connection_lost(exc)

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
    """Refuses requests before they are all in memory: without the token (401), to another host (421), too large (413),
    or too slow (408).

    Without a token the server is on loopback, and a web page could reach it by DNS rebinding. So the Host header must
    be a loopback name.
    """

    def __init__(self, app: ASGIApp, token: str | None, max_bytes: int, rejected: Callable[[int], None]) -> None:
        self._app, self._max_bytes, self._rejected = app, max_bytes, rejected
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        if problem := self._problem(dict(scope["headers"])):
            status, detail = problem
            self._rejected(status)
            return await JSONResponse({"detail": detail}, status_code=status)(scope, receive, send)
        await self._app(scope, self._bounded(receive), send)

    def _problem(self, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self._expected is not None:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                return 401, "a bearer token is needed (SANDBOX_TOKEN)"
            return None
        host = headers.get(b"host", b"localhost").decode("latin-1")
        return None if _is_loopback(host) else (421, f"{host[:80]!a} is not this machine's loopback; set SANDBOX_TOKEN")

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


@lru_cache
def _is_loopback(host: str) -> bool:
    """Whether a Host header, with or without port, names loopback."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
