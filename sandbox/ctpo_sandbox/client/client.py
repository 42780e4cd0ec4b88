"""The client of a rollout: many runs in flight, bounded retries; a fault is never reported as a result."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, get_args

import aiohttp

from ctpo_sandbox.client.servers import Connections, Server, Servers, base_urls, execution_url, without_login
from ctpo_sandbox.errors import SandboxUnavailable
from ctpo_sandbox.records import WALL_FACTOR, Verdict
from ctpo_sandbox.timeouts import CONNECT_TIMEOUT_S, HEALTH_ATTEMPT_TIMEOUT_S, QUEUE_ALLOWANCE_S
from ctpo_sandbox.variables import FAULT_HEADER, TOKEN, TOKEN_FILE, authorization

_RETRIED_CODES = (429, 500, 502, 503, 504)
_REFUSED_CODES = (400, 413, 422)
_HARMLESS = b'{"code": "pass", "run_timeout": 2}'


@dataclass(frozen=True)
class ExecutionResult:
    """A verdict about a snippet. `wall_s`: seconds of execution without queueing, as measured by the server."""

    status: Verdict
    stdout: str
    stderr: str
    wall_s: float


@dataclass
class ClientStats:
    """Counts since the client was created; `results` by status. Never reset.

    blamed: results `runtime_error` of programs over which servers failed again and again.
    """

    requests: int = 0
    retries: int = 0
    unavailable: int = 0
    blamed: int = 0
    results: Counter[str] = field(default_factory=Counter)


class _Failed(NamedTuple):
    """An attempt that may be retried. pause_s: the pause that the server requested. over: as `errors.Over`."""

    reason: str
    pause_s: float | None = None
    over: str = ""


class SandboxClient:
    """Runs snippets on one server or several (given by base URLs or execution URLs).

    At most `max_concurrency` requests are in flight over all servers. Each goes to the server with the fewest requests,
    and after a failure to another one if possible. A server that stops answering gets no requests until it answers
    again, and requests waiting for it go to others. `request_timeout_s` bounds one `run` as its caller sees it:
    waiting, retries and backoff included. token: sent as a bearer token (default: the environment variable
    SANDBOX_TOKEN, or the file of SANDBOX_TOKEN_FILE). Connections belong to the running event loop and are opened by
    the first `run` in it, so the object can be created anywhere.
    """

    def __init__(
        self, url: str | Sequence[str], *, max_concurrency: int, request_timeout_s: float, token: str | None = None
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        if max_concurrency < 1 or not (request_timeout_s > 0 and math.isfinite(request_timeout_s)):
            raise ValueError("max_concurrency and request_timeout_s must be positive and finite")
        self._base_urls = base_urls([url] if isinstance(url, str) else url)
        self.stats = ClientStats()
        self._headers = {"content-type": "application/json", **authorization(token)}
        self._max_concurrency = max_concurrency
        self._request_timeout_s = request_timeout_s
        self._http: aiohttp.ClientSession
        self._servers: Servers
        self._free: asyncio.Semaphore

    @property
    def url(self) -> str:
        """Execution URLs, separated by commas."""
        return ",".join(execution_url(root) for root in self._base_urls)

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
        state = {"doing": f"waiting for one of {self._max_concurrency} slots (max_concurrency)"}
        try:
            async with asyncio.timeout(self._request_timeout_s), self._free:
                attempt_timeout_s = WALL_FACTOR * run_timeout_s + QUEUE_ALLOWANCE_S
                result = await self._run_with_retries(body, attempt_timeout_s, state)
        except TimeoutError:
            raise self._unavailable(f"no verdict within {self._request_timeout_s:g} s; was {state['doing']}") from None
        self.stats.results[result.status] += 1
        return result

    async def aclose(self) -> None:
        """Close the connections of the running loop; the client may be used again."""
        if self._loop is asyncio.get_running_loop():
            self._loop = None
            await self._servers.aclose()
            await self._http.close()

    def _bind_to_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._servers = Servers(self._base_urls)
        self._free = asyncio.Semaphore(self._max_concurrency)
        self._http = aiohttp.ClientSession(
            connector=Connections(limit=self._max_concurrency),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trust_env=False,  # a proxy meant for the internet must not see requests to the sandbox
        )

    def _unavailable(self, reason: str) -> SandboxUnavailable:
        self.stats.unavailable += 1
        return SandboxUnavailable(
            f"sandbox {without_login(self.url)}: {reason}. Check that the server runs (GET /health on the same host) "
            "and read its log; if it is only busy, raise sandbox.slots or sandbox.request_timeout_s, or lower "
            "sandbox.max_concurrency."
        )

    async def _run_with_retries(self, body: bytes, attempt_timeout_s: float, state: dict[str, str]) -> ExecutionResult:
        attempt = 0
        faults: list[tuple[Server, str]] = []
        while True:
            attempt += 1
            server = self._servers.take()
            try:
                await asyncio.sleep(max(0.0, server.resting_until - time.monotonic()))
                state["doing"] = f"waiting for the answer of {server.name} (attempt {attempt})"
                result = await self._attempt(server, body, attempt_timeout_s)
                if isinstance(result, ExecutionResult):
                    server.succeeded()
                    return result
                self.stats.retries += 1
                server.failed(result.pause_s)
                faults.append((server, result.over))
                if result.over and _is_repeated(faults) and await self._runs_others(server):
                    return self._blamed(result.reason)
                state["doing"] = f"backing off after attempt {attempt}: {result.reason}"
            finally:
                self._servers.give_back(server)

    async def _runs_others(self, server: Server) -> bool:
        """Whether it runs a harmless program."""
        return isinstance(await self._attempt(server, _HARMLESS, HEALTH_ATTEMPT_TIMEOUT_S), ExecutionResult)

    def _blamed(self, reason: str) -> ExecutionResult:
        """The result of a program over which servers fail, while they run others."""
        self.stats.blamed += 1
        text = f"[killed because the sandbox fails over this program, but ran a harmless one: {reason}]\n"
        return ExecutionResult("runtime_error", "", text, 0.0)

    async def _attempt(self, server: Server, body: bytes, timeout_s: float) -> ExecutionResult | _Failed:
        started = time.monotonic()
        try:
            async with (
                server.patience(timeout_s),
                self._http.post(server.url, data=body, headers=self._headers, allow_redirects=False) as response,
            ):
                content = await response.read()
        except aiohttp.ClientError as error:
            server.ready = False
            return _Failed(f"{type(error).__name__}: {error}")
        except TimeoutError:
            return _Failed(f"{server.name} does not answer, after {time.monotonic() - started:.1f} s")
        return self._result(server.name, response, content, time.monotonic() - started)

    def _result(
        self, url: str, response: aiohttp.ClientResponse, content: bytes, elapsed_s: float
    ) -> ExecutionResult | _Failed:
        status, text = response.status, content[:500].decode(errors="replace")
        if status in _RETRIED_CODES:
            over = "defect" if status == HTTPStatus.INTERNAL_SERVER_ERROR else response.headers.get(FAULT_HEADER, "")
            return _Failed(f"HTTP {status}: {text}", _retry_after_s(response), over)
        if status in _REFUSED_CODES:
            raise ValueError(f"sandbox {url} refused: HTTP {status}: {text}")
        if status == HTTPStatus.UNAUTHORIZED:
            raise self._unavailable(f"{url} wants a bearer token: set {TOKEN} or {TOKEN_FILE} to the server's")
        if status != HTTPStatus.OK:
            raise self._unavailable(f"HTTP {status}, is this a sandbox? {text[:200]}")
        try:
            return _parse(json.loads(content), elapsed_s)
        except (KeyError, TypeError, ValueError) as error:
            return _Failed(f"not an answer of a sandbox ({error!r}): {text[:200]}")


def _is_repeated(faults: list[tuple[Server, str]]) -> bool:
    """Whether two servers failed over a program, or one did twice that has replaced what failed.

    A machine without memory kills one run after another, so `killed` needs a second server.
    """
    over = [(server, cause) for server, cause in faults if cause]
    replaced = [server for server, cause in over if cause != "killed"]
    return len({server.root for server, _ in over}) > 1 or len(replaced) > 1


def _retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """Seconds of the Retry-After header; None for a date or without a header."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


def _parse(answer: dict[str, Any], elapsed_s: float) -> ExecutionResult:
    run = answer["run_result"]
    if answer["status"] not in get_args(Verdict):
        raise ValueError(f"unknown status {answer['status']!r}")
    return ExecutionResult(
        answer["status"], str(run["stdout"]), str(run["stderr"]), float(run.get("wall_s", elapsed_s))
    )
