"""Isolated Python execution service and its client; no torch, usable without the rest of the project.

    with start_server(slots=2, start_timeout_s=60, log_path=log, limits=Limits(memory_mb=384)) as server:
        client = SandboxClient(server.url, max_concurrency=64, request_timeout_s=60)
        result = await client.run("print(1 + 1)", run_timeout_s=4)

The contract, the limits and what is not enforced: docs/sandbox.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_sandbox.errors import SandboxStartError, SandboxUnavailable
from ctpo_sandbox.records import Limits

if TYPE_CHECKING:
    from ctpo_sandbox.client import ClientStats, ExecutionResult, SandboxClient
    from ctpo_sandbox.launch import SandboxServer, start_configured_server, start_server

_MODULES = {
    "ClientStats": "client",
    "ExecutionResult": "client",
    "SandboxClient": "client",
    "SandboxServer": "launch",
    "start_configured_server": "launch",
    "start_server": "launch",
}
"""What the server itself does not need, as it would load the HTTP clients."""

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


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
