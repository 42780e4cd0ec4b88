"""The sandbox of a run: one that it starts, one that the user names, or one of each node, whose program names it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import Problem, SandboxConfig

log = logging.getLogger(__name__)

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


def not_installed(url: str) -> list[str]:
    """Libraries that programs may expect and the server at `url` lacks, as its `/health` says.

    Raises OSError when it does not answer.
    """
    import httpx

    from ctpo_sandbox.variables import authorization

    try:
        # Ten seconds: it answers at once, unless its node is overloaded.
        answer = httpx.get(f"{url}/health", headers=authorization(), timeout=10, trust_env=False).raise_for_status()
        return [str(name) for name in answer.json().get("not_installed", ())]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise OSError(f"the sandbox {url} does not answer: {error}") from error


def lacking(names: Sequence[str], whose: str) -> Iterator[Problem]:
    """A warning that programs will miss these libraries, if there are any."""
    if names:
        message = f"{whose} lacks {', '.join(names)}: programs that import them fail, and the model learns not to"
        fix = "pip install 'ctpo-megatron[sandbox-math]' into the server's environment"
        yield Problem("sandbox", message, fix, severity="warning")


def node_sandbox_problem() -> Problem | None:
    """Why this node's sandbox cannot be used; sends it a request."""
    import httpx

    from ctpo_sandbox.variables import authorization

    try:
        url = node_sandbox_url()
        # Ten seconds: it answers at once, unless its node is overloaded.
        httpx.get(f"{url}/health", headers=authorization(), timeout=10, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Problem("sandbox", f"its sandbox {url} ({_VARIABLES[0]}) does not answer: {error}")
    except (LookupError, ValueError) as error:
        return Problem("sandbox", str(error.args[0]))
    return None


@contextmanager
def open_sandbox(sandbox: SandboxConfig, nodes: int, logs: Path) -> Iterator[str | None]:
    """Yield the URL of the sandbox of all engines, or None if every node has its own; a server of ours ends after.

    logs: folder for its output. Logs what a server lacks. Raises SandboxStartError, and as `node_sandbox_url`.
    """
    if sandbox.url is not None:
        for url in sandbox.url.split(","):
            _warn_of_missing(url)
        yield sandbox.url
    elif names_a_server() or nodes > 1:
        if names_a_server():
            _warn_of_missing(node_sandbox_url())
        yield None
    else:
        from ctpo_sandbox import start_configured_server

        with start_configured_server(sandbox, LogPaths(logs).sandbox) as server:
            _warn_of_missing(server.url)
            yield server.url


def _warn_of_missing(url: str) -> None:
    try:
        problems = list(lacking(not_installed(url), f"the sandbox {url}"))
    except OSError as error:  # its clients try for longer
        log.warning("warning: %s", error)
        return
    for problem in problems:
        log.warning("warning: %s", problem)
