"""The client of a rollout: many runs in flight, bounded retries, and never a fault dressed up as a result."""

import asyncio
import json
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

_PATH = "/faas/sandbox"
_STATUSES = ("success", "timeout", "runtime_error")
_RETRIED_CODES = (429, 500, 502, 503, 504)
_REFUSED_CODES = (400, 413, 422)
_MAX_ATTEMPTS = 5
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


class SandboxClient:
    """Runs snippets on the server at `url` (its root, or its whole execution address).

    At most `max_concurrency` requests are in flight; `request_timeout_s` bounds one `run` as its caller sees it,
    waiting, retries and backoff included. Connections belong to the running event loop and are opened by the first
    `run` in it, so the object can be made anywhere.
    """

    def __init__(self, url: str, *, max_concurrency: int, request_timeout_s: float) -> None:
        if max_concurrency < 1 or not (request_timeout_s > 0 and math.isfinite(request_timeout_s)):
            raise ValueError("max_concurrency and request_timeout_s must be positive and finite")
        root = url.rstrip("/").removesuffix(_PATH)
        self.url = f"{root}{_PATH}/"
        self.stats = ClientStats()
        self._max_concurrency = max_concurrency
        self._request_timeout_s = request_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient
        self._free: asyncio.Semaphore

    async def run(self, code: str, *, stdin: str = "", run_timeout_s: float) -> ExecutionResult:
        """Run `code` for at most `run_timeout_s` seconds.

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
        except _Retry as last:
            raise self._unavailable(f"{_MAX_ATTEMPTS} attempts failed; the last one: {last}") from last
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

    async def _run_with_retries(self, body: bytes, state: dict[str, str]) -> ExecutionResult:
        backoff_s = _FIRST_BACKOFF_S
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            state["doing"] = f"waiting for the server's answer (attempt {attempt})"
            try:
                return await self._attempt(body)
            except _Retry as error:
                if attempt == _MAX_ATTEMPTS:
                    raise
                self.stats.retries += 1
                state["doing"] = f"backing off after attempt {attempt}: {error}"
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        raise AssertionError("unreachable")

    async def _attempt(self, body: bytes) -> ExecutionResult:
        started = time.monotonic()
        try:
            response = await self._http.post(self.url, content=body, headers={"content-type": "application/json"})
        except httpx.TransportError as error:
            raise _Retry(f"{type(error).__name__}: {error}") from error
        if response.status_code in _RETRIED_CODES:
            raise _Retry(f"HTTP {response.status_code}: {response.text[:500]}")
        if response.status_code in _REFUSED_CODES:
            raise ValueError(f"sandbox {self.url} refused: HTTP {response.status_code}: {response.text[:500]}")
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
