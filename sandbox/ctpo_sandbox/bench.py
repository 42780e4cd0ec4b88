"""Measures executions per second and latency of servers, and how they share the work."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import httpx

from ctpo_sandbox.client import SandboxClient
from ctpo_sandbox.errors import SandboxUnavailable
from ctpo_sandbox.servers import base_urls
from ctpo_sandbox.timeouts import BENCH_FIRST_RUN_S
from ctpo_sandbox.variables import authorization

SNIPPETS = {
    "print": "print(1 + 1)",
    "numpy": "import numpy as np\nprint(np.linalg.norm(np.arange(100.0)))",
    "integrate": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**3 + 2 * x, x))",
    "heavy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**2 * sympy.sin(x), x))",
    "solve": "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 7 * x + 10, x))",
}


@dataclass(frozen=True)
class Measurement:
    """One snippet at one concurrency. Latencies as seen by the client, including queueing, in milliseconds.

    lost: requests without a verdict. retries: attempts that failed. shares: of the runs, by server.
    """

    snippet: str
    concurrency: int
    runs: int
    per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    lost: int = 0
    retries: int = 0
    shares: dict[str, float] = field(default_factory=dict)


async def measure(
    url: str | Sequence[str], snippet: str, concurrency: int, seconds: float, run_timeout_s: float = 20.0
) -> Measurement:
    """Keep `concurrency` requests in flight for `seconds`. Raises RuntimeError for a run that does not succeed."""
    # Retries are measured, too: so a request may outlast the restart of a server.
    client = SandboxClient(url, max_concurrency=concurrency, request_timeout_s=300)
    code, latencies = SNIPPETS[snippet], []
    await client.run(code, run_timeout_s=run_timeout_s)  # connections and the worker's first run
    end = time.monotonic() + seconds

    async def one_after_another() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            try:
                result = await client.run(code, run_timeout_s=run_timeout_s)
            except SandboxUnavailable:  # counted by the client
                continue
            latencies.append(time.monotonic() - started)
            if result.status != "success":
                raise RuntimeError(f"{url}: {snippet} ended with {result.status}: {result.stderr[-500:]}")

    started = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    elapsed = time.monotonic() - started
    await client.aclose()
    latencies.sort()
    p50, p90, p99 = (1000 * latencies[min(len(latencies) - 1, int(q * len(latencies)))] for q in (0.5, 0.9, 0.99))
    counts = client.stats.unavailable, client.stats.retries
    return Measurement(snippet, concurrency, len(latencies), len(latencies) / elapsed, p50, p90, p99, *counts)


async def _first(url: str) -> None:
    client = SandboxClient(url, max_concurrency=1, request_timeout_s=BENCH_FIRST_RUN_S)
    await client.run(SNIPPETS["print"], run_timeout_s=BENCH_FIRST_RUN_S / 2)
    await client.aclose()


def executions(urls: Sequence[str]) -> dict[str, int]:
    """Finished runs of each server, from its `GET /health`."""
    with httpx.Client(trust_env=False, headers=authorization()) as http:
        return {url: http.get(f"{url}/health").raise_for_status().json()["executions"] for url in base_urls(urls)}


def measure_all(urls: Sequence[str], snippet: str, concurrency: int, seconds: float) -> Measurement:
    """`measure` over several servers of ours, with their shares of the runs."""
    before = executions(urls)
    found = asyncio.run(measure(urls, snippet, concurrency, seconds))
    done = {url: count - before[url] for url, count in executions(urls).items()}
    return replace(found, shares={url: count / max(1, sum(done.values())) for url, count in done.items()})


def run(urls: Sequence[str], seconds: float, concurrencies: Sequence[int]) -> int:
    """Print a table; returns 1 when a request was lost, else 0. Shares of several servers are in the order of `urls`.

    Raises SandboxUnavailable for a server that does not answer.
    """
    for url in urls:
        asyncio.run(_first(url))
    several = len(urls) > 1
    more = f"{'lost':>6}{'retries':>9}  shares" if several else ""
    print(f"{'snippet':<10}{'concurrency':>12}{'runs/s':>10}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{more}")
    lost = 0
    for snippet in SNIPPETS:
        for concurrency in concurrencies:
            if several:
                m = measure_all(urls, snippet, concurrency, seconds)
            else:
                m = asyncio.run(measure(urls, snippet, concurrency, seconds))
            lost += m.lost
            shares = " ".join(f"{share:.0%}" for share in m.shares.values())
            more = f"{m.lost:>6}{m.retries:>9}  {shares}" if several else ""
            print(
                f"{m.snippet:<10}{m.concurrency:>12}{m.per_second:>10.1f}{m.p50_ms:>10.1f}{m.p90_ms:>10.1f}"
                f"{m.p99_ms:>10.1f}{more}"
            )
    return 1 if lost else 0
