"""Isolated Python execution service and its client; no torch, usable without the rest of the project.

    with start_server(slots=2, start_timeout_s=60, log_path=log, limits=Limits(memory_mb=384)) as server:
        client = SandboxClient(server.url, max_concurrency=64, request_timeout_s=60)
        result = await client.run("print(1 + 1)", run_timeout_s=4)

What these names need, as aiohttp, is imported when the first of them is used.

`client` sends code, and `server` runs it. `inside` has what runs in the processes of programs, `isolation` what
confines them.

The contract, the limits and what is not enforced: docs/sandbox.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from ctpo_sandbox.client import ClientStats, ExecutionResult, SandboxClient
    from ctpo_sandbox.errors import SandboxStartError, SandboxUnavailable
    from ctpo_sandbox.launch import SandboxServer, start_configured_server, start_server
    from ctpo_sandbox.records import Limits
else:
    _MODULES = {
        **dict.fromkeys(("ClientStats", "ExecutionResult", "SandboxClient"), "client"),
        **dict.fromkeys(("SandboxStartError", "SandboxUnavailable"), "errors"),
        **dict.fromkeys(("SandboxServer", "start_configured_server", "start_server"), "launch"),
        "Limits": "records",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
