"""Load balancing: a request goes to the available server with the fewest requests in flight."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp

from ctpo_sandbox.timeouts import FIRST_BACKOFF_S, MAX_BACKOFF_S, PROBE_MISSES, PROBE_POLL_S, PROBE_TIMEOUT_S

_PATH = "/faas/sandbox"


def base_urls(addresses: Sequence[str]) -> list[str]:
    """Base URLs of servers, given as base URLs or execution URLs. Raises ValueError for an empty list."""
    if not addresses:
        raise ValueError("url: at least one server is needed")
    return [address.rstrip("/").removesuffix(_PATH) for address in addresses]


def execution_url(root: str) -> str:
    """Return the execution URL of a server."""
    return f"{root}{_PATH}/"


def without_login(url: str) -> str:
    """For messages: an address may hold a name and a password."""
    return re.sub(r"://[^/]*@", "://***@", url)


class Connections(aiohttp.TCPConnector):
    """A connector that counts as closed once its loop is, without a warning about an unclosed client."""

    @property
    def closed(self) -> bool:
        return super().closed or self._loop.is_closed()

    def __del__(self, *arguments: Any) -> None:
        if not self.closed:
            super().__del__(*arguments)


@dataclass(eq=False)
class Server:
    """One server and its state.

    ready: whether it receives requests while other servers are ready. resting_until: monotonic seconds. awaited:
    timeouts of the requests in flight.
    """

    root: str
    in_flight: int = 0
    failures: int = 0
    ready: bool = True
    resting_until: float = 0.0
    awaited: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Its execution URL."""
        return execution_url(self.root)

    @property
    def name(self) -> str:
        """The same for messages."""
        return without_login(self.url)

    @contextlib.asynccontextmanager
    async def patience(self, timeout_s: float) -> AsyncIterator[None]:
        """Wait for its answer inside. Raises TimeoutError after `timeout_s` seconds, or once it is unavailable."""
        async with asyncio.timeout(timeout_s) as deadline:
            self.awaited.add(deadline)
            try:
                yield
            finally:
                self.awaited.discard(deadline)

    def mark_unavailable(self) -> None:
        """It does not answer: requests go to other servers, including requests in flight."""
        self.ready = False
        for deadline in self.awaited:
            if not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())

    def succeeded(self) -> None:
        """It answered."""
        self.failures = 0

    def failed(self, pause_s: float | None) -> None:
        """Pause requests to it for `pause_s`, or with exponential backoff."""
        self.failures += 1
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (self.failures - 1), MAX_BACKOFF_S)
        self.resting_until = time.monotonic() + (backoff_s if pause_s is None else min(pause_s, MAX_BACKOFF_S))


class Servers:
    """The servers of a client in one event loop; if there are several, those in use or not ready are probed."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._servers = [Server(root) for root in addresses]
        # Clients with one request at a time must not all start with the same server.
        random.SystemRandom().shuffle(self._servers)
        self._watchers: dict[Server, asyncio.Task[None]] = {}
        self._http: aiohttp.ClientSession | None = None

    def take(self) -> Server:
        """Return the server for the next request, which counts as in flight there until `give_back`."""
        now = time.monotonic()
        server = min(self._servers, key=lambda s: (not s.ready, max(0.0, s.resting_until - now), s.in_flight))
        server.in_flight += 1
        if len(self._servers) > 1 and self._http is None:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            self._http = aiohttp.ClientSession(connector=Connections(), timeout=timeout)
        if self._http is not None and server not in self._watchers:
            self._watchers[server] = asyncio.ensure_future(self._watch(server, self._http))
        return server

    def give_back(self, server: Server) -> None:
        """Note that the request is over."""
        server.in_flight -= 1

    async def aclose(self) -> None:
        """Stop probing and close its connections."""
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def _watch(self, server: Server, http: aiohttp.ClientSession) -> None:
        misses = 0
        try:
            while server.in_flight or not server.ready:
                await asyncio.sleep(PROBE_POLL_S)
                status = await _probe(http, server.root)
                misses = misses + 1 if status is None else 0
                if misses >= PROBE_MISSES:
                    server.mark_unavailable()
                elif status is not None:
                    server.ready = status != HTTPStatus.SERVICE_UNAVAILABLE
        finally:
            del self._watchers[server]


async def _probe(http: aiohttp.ClientSession, root: str) -> int | None:
    """The HTTP status of its readiness, None without an answer; other implementations may answer 404."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.get(f"{root}/ready") as response:
            return response.status
    return None
