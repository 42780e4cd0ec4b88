"""Executions per second and latency of any server that speaks the contract."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_sandbox.client import SandboxClient

SNIPPETS = {
    "print": "print(1 + 1)",
    "numpy": "import numpy as np\nprint(np.linalg.norm(np.arange(100.0)))",
    "integrate": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**3 + 2 * x, x))",
    "heavy": "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(x**2 * sympy.sin(x), x))",
    "solve": "import sympy\nx = sympy.symbols('x')\nprint(sympy.solve(x**2 - 7 * x + 10, x))",
}
CONCURRENCIES = (1, 8, 32)
_REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Measurement:
    """One snippet at one concurrency. Latencies are the client's, queueing included, in milliseconds."""

    snippet: str
    concurrency: int
    runs: int
    per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


async def measure(url: str, snippet: str, concurrency: int, seconds: float, run_timeout_s: float = 20.0) -> Measurement:
    """Keep `concurrency` requests in flight for `seconds`. Raises RuntimeError for a run that does not succeed."""
    client = SandboxClient(url, max_concurrency=concurrency, request_timeout_s=_REQUEST_TIMEOUT_S)
    code, latencies = SNIPPETS[snippet], []
    await client.run(code, run_timeout_s=run_timeout_s)  # connections and the worker's first run
    end = time.monotonic() + seconds

    async def one_after_another() -> None:
        while time.monotonic() < end:
            started = time.monotonic()
            result = await client.run(code, run_timeout_s=run_timeout_s)
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
    return Measurement(snippet, concurrency, len(latencies), len(latencies) / elapsed, p50, p90, p99)


def run(url: str, seconds: float, concurrencies: Sequence[int]) -> int:
    """Print a table; 0."""
    print(f"{'snippet':<10}{'concurrency':>12}{'runs/s':>10}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}")
    for snippet in SNIPPETS:
        for concurrency in concurrencies:
            m = asyncio.run(measure(url, snippet, concurrency, seconds))
            print(
                f"{m.snippet:<10}{m.concurrency:>12}{m.per_second:>10.1f}{m.p50_ms:>10.1f}{m.p90_ms:>10.1f}{m.p99_ms:>10.1f}"
            )
    return 0
