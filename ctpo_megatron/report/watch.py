"""The server of `ctpo watch`: a run's report and trajectories on loopback, read only. What it shows is hostile text."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.report.page_data import bundle, rendered
from ctpo_megatron.report.trajectories.library import OutOfTimeError
from ctpo_megatron.report.trajectories.query import QueryError
from ctpo_megatron.report.watch_pages import BusyError, WatchPages
from ctpo_sandbox.front import Guard, RequestRule, configured, listen, url_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


log = logging.getLogger(__name__)

SEND_S = 20.0
"""What a reader may take for `CHUNK` bytes of an answer."""
CHUNK = 1 << 16
KEEP_ALIVE_S, END_S = 5, 1
MOST_CONNECTIONS = 64
_POLICY = "content-security-policy"
HEADERS = {
    _POLICY: (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Of every answer. Charts style their elements in line, which runs nothing."""


class WatchError(Exception):
    """The server cannot start as it was asked to; the message says what to change."""


def create_app(run_dir: Path, hosts: frozenset[str]) -> tuple[ASGIApp, WatchPages]:
    """The application over a run directory. hosts: values of `Host` that it answers to, with their port."""
    pages = WatchPages(run_dir)

    async def front(_: Request) -> Response:
        answer = await _answer(pages.report)
        scripts = await run_in_threadpool(known_scripts, bytes(answer.body).decode())
        answer.headers[_POLICY] = HEADERS[_POLICY].replace("script-src 'self'", f"script-src {' '.join(scripts)}")
        return answer

    async def results(request: Request) -> Response:
        return await _answer(lambda: pages.results(dict(request.query_params)))

    async def group(request: Request) -> Response:
        return await _answer(lambda: pages.group(request.path_params["address"]))

    async def file(request: Request) -> Response:
        found = await run_in_threadpool(asset, request.path_params["name"])
        if found is None:
            raise HTTPException(404, "there is no such file")
        content, kind = found
        return Response(content, media_type=kind)

    async def failed(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _html(pages.problem(_TITLES.get(error.status_code, "Not served"), error.detail), error.status_code)

    async def broken(_: Request, error: Exception) -> Response:
        log.error("a page could not be made", exc_info=error)
        return _html(pages.problem("A page could not be made", f"{type(error).__name__}; the terminal has more"), 500)

    routes = [
        Route("/", front),
        Route("/trajectories", results),
        Route("/trajectory/{address}", group),
        Route("/assets/{name}", file),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: broken})
    rule = RequestRule(("GET", "HEAD"), lambda host: host.lower() in hosts)
    return Careful(Guard(app, rule, max_bytes=0)), pages


async def _answer(make: Callable[[], str | None]) -> Response:
    """The page that a thread makes, or the status of why there is none. Raises HTTPException."""
    try:
        page = await run_in_threadpool(make)
    except QueryError as error:
        raise HTTPException(400, str(error)) from error
    except (BusyError, OutOfTimeError) as error:
        raise HTTPException(503, str(error) or "reading the dump took too long; reload to continue") from error
    except (DamagedFileError, FileNotFoundError) as error:
        raise HTTPException(500, str(error)) from error
    if page is None:
        raise HTTPException(404, "this run has no such trajectory (now); a resumed run discards steps that it repeats")
    return _html(page, 200)


_TITLES = {400: "What is searched for is unclear", 404: "Not found", 405: "Reading only", 503: "Busy"}


def _html(page: str, status: int) -> Response:
    return Response(page, status, media_type="text/html")


class Careful:
    """Sends `HEADERS` with each answer, and gives up on readers that are too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_headers(_patient(send, scope["method"] == "HEAD"))
        await self._app(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name for name, _ in message["headers"]}
            own = [(n.encode(), value.encode()) for n, value in HEADERS.items() if n.encode() not in there]
            message = {**message, "headers": [*message["headers"], *own]}
        await send(message)

    return sent


def _patient(send: Send, no_body: bool) -> Send:
    """Sends bodies piece by piece, each with a deadline."""

    async def sent(message: Message) -> None:
        body = message.get("body", b"")
        if message["type"] != "http.response.body" or no_body or len(body) <= CHUNK:
            return await _within(send(message))
        for start in range(0, len(body), CHUNK):
            last = start + CHUNK >= len(body)
            more = message.get("more_body", False) or not last
            await _within(send({**message, "body": body[start : start + CHUNK], "more_body": more}))

    return sent


async def _within(sending: Awaitable[None]) -> None:
    """Raises ConnectionError at the deadline; the server closes the connection."""
    try:
        await asyncio.wait_for(sending, SEND_S)
    except TimeoutError:
        raise ConnectionError(f"a reader took more than {SEND_S:g} s for {CHUNK >> 10} KiB") from None


def serve(run_dir: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve a run directory until SIGINT or SIGTERM.

    host: a loopback address or `localhost`. port: 0 takes a free one. ready: called with the address.

    Raises WatchError.
    """
    with _listening(host, port) as listener:
        name, number = listener.getsockname()[:2]
        hosts = {f"[{name}]" if ":" in name else name, "localhost"}
        app, pages = create_app(run_dir, frozenset(f"{each}:{number}" for each in hosts))
        config = configured(
            app,
            MOST_CONNECTIONS,
            log_level="error",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=END_S,
        )
        ready(url_of(listener))
        server = uvicorn.Server(config)
        pages.stopped = lambda: server.should_exit  # a signal ends searches, too
        asyncio.run(server.serve(sockets=[listener]))


def _listening(host: str, port: int) -> socket.socket:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise WatchError(f"--host {host}: no IP address; give 127.0.0.1 or ::1") from None
    if not address.is_loopback:
        raise WatchError(
            f"--host {host}: everybody who reaches it could read the run; give 127.0.0.1, and let others use ssh -L"
        )
    try:
        return listen(str(address), port)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise WatchError(f"--port {port}: {why}; give another port, or 0 for a free one") from error


_CSS, _JS = "text/css", "text/javascript"
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


@cache
def asset(name: str) -> tuple[bytes, str] | None:
    """Content and media type of a file; None where there is none of this name."""
    match name:
        case "style.css":
            return rendered("watch.css.jinja").encode(), _CSS
        case "page.js":
            return rendered("report.js.jinja").encode(), _JS
        case "vega.js":
            return gzip.decompress(base64.b64decode(bundle())), _JS
    return None


def known_scripts(page: str) -> list[str]:
    """Hashes of our scripts in a report, as a Content-Security-Policy has them; of no other script that it may hold."""
    own = rendered("report.js.jinja").strip()
    texts = [match[1].encode() for match in _SCRIPT.finditer(page) if match[1].strip() == own]
    library = asset("vega.js")
    return [_hash(text) for text in [*texts, *([library[0]] if library else [])]]


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode('ascii')}'"
