"""The sandbox of a cluster node, whose program passes its address on, and what a server that runs already lacks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ctpo_megatron.config import Problem

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
