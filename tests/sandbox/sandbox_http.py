"""One HTTP client for all tests of this folder: making one costs more CPU than most requests."""

from __future__ import annotations

import json
from typing import Any

import httpx

from ctpo_sandbox import SandboxServer
from tests.support.deadlines import scaled

HTTP = httpx.Client(trust_env=False, timeout=scaled(40))


def post(server: SandboxServer, request: Any, path: str = "/faas/sandbox/") -> httpx.Response:
    """One request for an execution; lone surrogates and NaN go through."""
    body = json.dumps(request).encode()
    return HTTP.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json"})


def health(url: str) -> dict[str, Any]:
    """What `GET /health` says."""
    found: dict[str, Any] = HTTP.get(f"{url}/health").json()
    return found
