"""Isolated Python execution service and its client; no torch, usable without the rest of the project.

    with start_server(slots=2, start_timeout_s=60, log_path=log, limits=Limits(memory_mb=384)) as server:
        client = SandboxClient(server.url, max_concurrency=64, request_timeout_s=60)
        result = await client.run("print(1 + 1)", run_timeout_s=4)

The contract, the limits and what is not enforced: docs/sandbox.md.
"""

from ctpo_sandbox.client import ClientStats, ExecutionResult, SandboxClient
from ctpo_sandbox.errors import SandboxStartError, SandboxUnavailable
from ctpo_sandbox.launch import SandboxServer, start_configured_server, start_server
from ctpo_sandbox.records import Limits

__all__ = [
    "ClientStats",
    "ExecutionResult",
    "Limits",
    "SandboxClient",
    "SandboxServer",
    "SandboxStartError",
    "SandboxUnavailable",
    "start_configured_server",
    "start_server",
]
