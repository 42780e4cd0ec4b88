"""Checks before a training job that a server implements the API."""

import asyncio
import json
from dataclasses import dataclass

import httpx

from ctpo_sandbox.client import SandboxClient
from ctpo_sandbox.timeouts import SMOKE_TIMEOUT_S
from ctpo_sandbox.variables import authorization


@dataclass(frozen=True)
class Case:
    """One request: code, stdin and limit; the expected verdict, and text that stdout or stderr must contain."""

    name: str
    code: str
    status: str
    contains: str = ""
    stdin: str = ""
    run_timeout_s: float = 10.0


CASES = (
    Case("arithmetic", "print(6 * 7)", "success", "42"),
    Case("standard input", "print(input()[::-1])", "success", "cba", stdin="abc\n"),
    Case("end of input", "input()", "runtime_error", "EOFError"),
    Case("an exception names its line", "x = 1\nx / 0", "runtime_error", 'File "main.py", line 2'),
    Case("an exit code", "raise SystemExit(3)", "runtime_error"),
    Case("an endless loop", "print('before', flush=True)\nwhile True: pass", "timeout", "before", run_timeout_s=1.0),
    Case("a loop inside the interpreter", "sum(range(9, 10**11))", "timeout", run_timeout_s=1.0),
    Case("too much memory", "x = bytearray(1 << 40)", "runtime_error", "MemoryError"),
    Case("a flood of output", "print('x' * 3_000_000)", "success", "[output cut"),
    Case("bytes that are no text", r"import os; os.write(1, b'\xffok')", "success", "ok"),
    Case("numpy", "import numpy; print(numpy.arange(4).sum())", "success", "6"),
    Case("sympy", "from sympy import *; x = symbols('x'); print(integrate(2 * x, x))", "success", "x**2"),
    Case("no other program", "import subprocess; subprocess.run(['true'])", "runtime_error", "PermissionError"),
    Case("no network", "import socket; socket.create_connection(('127.0.0.1', 80), 1)", "runtime_error", "Permission"),
    Case("no secrets", "import os; print('SANDBOX_TOKEN' in os.environ)", "success", "False"),
    Case("files last for a run", "open('left', 'w').write('x'); import os; print(os.listdir())", "success", "left"),
    Case("and no longer", "import os; print(os.listdir())", "success", "[]"),
)

REFUSALS: dict[str, tuple[dict[str, object], int]] = {
    "another language is refused": ({"language": "c"}, 400),
    "a bad limit is refused": ({"run_timeout": -1}, 422),
}
"""name -> (fields of a request, HTTP status)."""


def run(url: str) -> int:
    """Print one line per case; returns 1 when any failed, else 0."""
    return asyncio.run(_run(url))


async def _run(url: str) -> int:
    client = SandboxClient(url, max_concurrency=1, request_timeout_s=SMOKE_TIMEOUT_S)
    failures = 0
    for case in CASES:
        failures += not _report(case.name, await _problem(client, case))
    for name, (fields, code) in REFUSALS.items():
        failures += not _report(name, await _refusal(client.url, {"code": "1", **fields}, code))
    await client.aclose()
    total = len(CASES) + len(REFUSALS)
    print(f"{total - failures} of {total} passed")
    return 1 if failures else 0


async def _problem(client: SandboxClient, case: Case) -> str:
    result = await client.run(case.code, stdin=case.stdin, run_timeout_s=case.run_timeout_s)
    if result.status != case.status:
        return f"expected {case.status}, got {result.status}: {(result.stderr or result.stdout)[-200:]!r}"
    if case.contains not in result.stdout + result.stderr:
        return f"expected {case.contains!r} in {(result.stdout + result.stderr)[:200]!r}"
    return ""


async def _refusal(url: str, body: dict[str, object], code: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=SMOKE_TIMEOUT_S, headers=authorization()) as http:
        response = await http.post(url, content=json.dumps(body), headers={"content-type": "application/json"})
    return "" if response.status_code == code else f"expected HTTP {code}, got {response.status_code}"


def _report(name: str, problem: str) -> bool:
    print(f"{'FAILED' if problem else 'ok':<7}{name}{': ' + problem if problem else ''}")
    return not problem
