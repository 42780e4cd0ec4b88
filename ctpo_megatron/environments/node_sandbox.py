"""The sandbox of a run: one that it starts, one that the user names, or one of each node, whose program names it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import SandboxConfig

_VARIABLES = ("CTPO_SANDBOX_URL", "CTPO_SANDBOX_URL_FILE")


def names_a_server() -> bool:
    """Whether this process knows the address of a sandbox on its node."""
    return any(os.environ.get(name) for name in _VARIABLES)


def node_sandbox_url() -> str:
    """Address of this node's sandbox. Raises LookupError with advice when there is none, ValueError as `node_url`."""
    from ctpo_sandbox.variables import node_url

    url = node_url()
    if not url:
        raise LookupError(
            f"this node has no sandbox: {_VARIABLES[0]} is not set for its Ray processes. Start the node with "
            "`python -m ctpo_launchers.node`, or set sandbox.url"
        )
    return url


@contextmanager
def open_sandbox(sandbox: SandboxConfig, nodes: int, logs: Path) -> Iterator[str | None]:
    """Yield the URL of the sandbox of all engines, or None if every node has its own; a server of ours ends after.

    logs: folder for its output. Raises SandboxStartError.
    """
    if sandbox.url is not None or names_a_server() or nodes > 1:
        yield sandbox.url
    else:
        from ctpo_sandbox import start_configured_server

        with start_configured_server(sandbox, LogPaths(logs).sandbox) as server:
            yield server.url
