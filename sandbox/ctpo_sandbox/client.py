"""The client of a rollout: many runs in flight, bounded retries, and never a fault dressed up as a result."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from ctpo_sandbox.token import TOKEN, TOKEN_FILE, shared_token

_PATH = "/faas/sandbox"
_STATUSES = ("success", "timeout", "runtime_error")
_RETRIED_CODES = (429, 500, 502, 503, 504)
_REFUSED_CODES = (400, 413, 422)
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class SandboxUnavailable(Exception):
    """No verdict could be had: the sandbox is down, overloaded or broken. Says nothing about the snippet."""


@dataclass(frozen=True)
class ExecutionResult:
    """A verdict about a snippet. `wall_s`: seconds it ran, as the server measured them, queueing excluded."""

    status: Literal["success", "timeout", "runtime_error"]
    stdout: str
    stderr: str
    wall_s: float


@dataclass
class ClientStats:
    """Counts since the client was made; `results` by status. Only growing, never reset."""

    requests: int = 0
    retries: int = 0
    unavailable: int = 0
    results: Counter[str] = field(default_factory=Counter)


class _Retry(Exception):
    """An attempt failed in a way that another may not."""


def authorization(token: str | None = None) -> dict[str, str]:
    """Headers with the token, or with that of the environment; none without either. Raises ValueError."""
    token = token or shared_token()
    return {"authorization": f"Bearer {token}"} if token else {}


@dataclass
class _Server:
    """One address: requests in flight, and until when (monotonic seconds) it is left alone after a failure."""

    url: str
    in_flight: int = 0
    failures: int = 0
    resting_until: float = 0.0


class SandboxClient:
    """Runs snippets on one server or several (their roots, or their whole execution addresses).

    At most `max_concurrency` requests are in flight over all servers; each goes to the one with the fewest, and after a
    failure to another where there is one. `request_timeout_s` bounds one `run` as its caller sees it: waiting, retries
    and backoff included. token: sent as a bearer token (default: what the environment variable SANDBOX_TOKEN holds, or
    the file that SANDBOX_TOKEN_FILE names). Connections belong to the running event loop and are opened by the first
    `run` in it, so the object can be made anywhere.
    """

    def __init__(
        self, url: str | Sequence[str], *, max_concurrency: int, request_timeout_s: float, token: str | None = None
    ) -> None:
        if max_concurrency < 1 or not (request_timeout_s > 0 and math.isfinite(request_timeout_s)):
            raise ValueError("max_concurrency and request_timeout_s must be positive and finite")
        given = [url] if isinstance(url, str) else list(url)
        if not given:
            raise ValueError("url: at least one server is needed")
        self._servers = [_Server(f"{address.rstrip('/').removesuffix(_PATH)}{_PATH}/") for address in given]
        self.stats = ClientStats()
        self._headers = {"content-type": "application/json", **authorization(token)}
        self._max_concurrency = max_concurrency
        self._request_timeout_s = request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient
        self._free: asyncio.Semaphore

    @property
    def url(self) -> str:
        """Execution addresses, separated by commas."""
        return ",".join(server.url for server in self._servers)

    async def run(self, code: str, *, stdin: str = "", run_timeout_s: float) -> ExecutionResult:
        """Run `code` for at most `run_timeout_s` seconds; infrastructure faults are retried until the deadline.

        Raises SandboxUnavailable when no verdict was reached within `request_timeout_s`, and ValueError when the server
        refuses the request as malformed.
        """
        self._bind_to_running_loop()
        self.stats.requests += 1
        # json.dumps escapes lone surrogates, which httpx's own encoder cannot encode.
        payload = {"code": code, "stdin": stdin, "language": "python", "run_timeout": run_timeout_s}
        body = json.dumps(payload).encode("ascii")
        state = {"doing": f"waiting for one of {self._max_concurrency} places (max_concurrency)"}
        try:
            async with asyncio.timeout(self._request_timeout_s), self._free:
                result = await self._run_with_retries(body, state)
        except TimeoutError:
            raise self._unavailable(f"no verdict within {self._request_timeout_s:g} s; was {state['doing']}") from None
        self.stats.results[result.status] += 1
        return result

    async def aclose(self) -> None:
        """Close the connections of the running loop; the client may be used again."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._http.aclose()

    def _bind_to_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._free = asyncio.Semaphore(self._max_concurrency)
        # trust_env: a proxy meant for the internet must not see requests to the sandbox.
        self._http = httpx.AsyncClient(
            timeout=None, trust_env=False, limits=httpx.Limits(max_connections=self._max_concurrency)
        )

    def _unavailable(self, reason: str) -> SandboxUnavailable:
        self.stats.unavailable += 1
        return SandboxUnavailable(
            f"sandbox {self.url}: {reason}. Check that the server runs (GET /health on the same host) and read its "
            "log; if it is only busy, raise sandbox.slots or sandbox.request_timeout_s, or lower "
            "sandbox.max_concurrency."
        )

    def _least_loaded(self) -> _Server:
        """Servers that failed lately come last; the one whose rest ends first if all of them did."""
        now = time.monotonic()
        return min(self._servers, key=lambda server: (max(0.0, server.resting_until - now), server.in_flight))

    async def _run_with_retries(self, body: bytes, state: dict[str, str]) -> ExecutionResult:
        attempt = 0
        while True:
            attempt += 1
            server = self._least_loaded()
            await asyncio.sleep(max(0.0, server.resting_until - time.monotonic()))
            state["doing"] = f"waiting for the answer of {server.url} (attempt {attempt})"
            server.in_flight += 1
            try:
                result = await self._attempt(server.url, body)
                server.failures = 0
                return result
            except _Retry as error:
                self.stats.retries += 1
                server.failures += 1
                backoff_s = min(_FIRST_BACKOFF_S * 2 ** (server.failures - 1), _MAX_BACKOFF_S)
                server.resting_until = time.monotonic() + backoff_s
                state["doing"] = f"backing off after attempt {attempt}: {error}"
            finally:
                server.in_flight -= 1

    async def _attempt(self, url: str, body: bytes) -> ExecutionResult:
        started = time.monotonic()
        try:
            response = await self._http.post(url, content=body, headers=self._headers)
        except httpx.TransportError as error:
            raise _Retry(f"{type(error).__name__}: {error}") from error
        if response.status_code in _RETRIED_CODES:
            raise _Retry(f"HTTP {response.status_code}: {response.text[:500]}")
        if response.status_code in _REFUSED_CODES:
            raise ValueError(f"sandbox {url} refused: HTTP {response.status_code}: {response.text[:500]}")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise self._unavailable(f"{url} wants a bearer token: set {TOKEN} or {TOKEN_FILE} to the server's")
        if response.status_code != httpx.codes.OK:
            raise self._unavailable(f"HTTP {response.status_code}, is this a sandbox? {response.text[:200]}")
        try:
            return _parse(response.json(), elapsed_s=time.monotonic() - started)
        except (KeyError, TypeError, ValueError) as error:
            raise _Retry(f"not an answer of a sandbox ({error!r}): {response.text[:200]}") from error


def _parse(answer: dict[str, Any], elapsed_s: float) -> ExecutionResult:
    run = answer["run_result"]
    if answer["status"] not in _STATUSES:
        raise ValueError(f"unknown status {answer['status']!r}")
    return ExecutionResult(
        answer["status"], str(run["stdout"]), str(run["stderr"]), float(run.get("wall_s", elapsed_s))
    )
