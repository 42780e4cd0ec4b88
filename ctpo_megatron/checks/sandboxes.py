"""The sandbox of a run or of a node: whether one starts, answers and has the libraries that programs expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import Problem, RolloutConfig, SandboxConfig, Severity, passed
from ctpo_megatron.environments import names_a_server, node_sandbox_url
from ctpo_sandbox import temporary
from ctpo_sandbox.inside.libraries import absent
from ctpo_sandbox.variables import authorization

if TYPE_CHECKING:
    from ctpo_sandbox import Limits, SandboxServer

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 60.0, 10.0
"""For a sandbox to start and test its isolation; for a server that runs to answer, which it does at once."""
NODE = "node"
"""In place of a least isolation: the node of a cluster has a sandbox that runs already."""


def check_sandbox(require: str) -> list[Problem]:
    """Isolation of a sandbox of this machine. require: least level, `NODE`, or ""; then a failure is a warning."""
    if require == NODE or names_a_server():
        return list(_of_node())
    bad: Severity = "error" if require else "warning"
    fix = "docs/sandbox.md says what each level needs; sandbox.require takes less, sandbox.url another machine"
    try:
        from ctpo_sandbox import Limits, SandboxStartError

        with trial_sandbox(Limits(run_timeout_s=5), require or "landlock") as server:
            health = server.health
    except ImportError as error:
        return [Problem("sandbox", f"does not import: {error}", extra="sandbox", severity=bad)]
    except SandboxStartError as error:
        return [Problem("sandbox", f"does not start: {error}", fix, severity=bad)]
    return [
        passed("sandbox", f"level {health['level']}: {'; '.join(health['enforced'])}"),
        Problem("  not enforced", "; ".join(health["not_enforced"]), severity="warning"),
        *_lacking(health["not_installed"], "the sandbox of this machine"),
    ]


@contextmanager
def trial_sandbox(limits: Limits, require: str) -> Iterator[SandboxServer]:
    """Run a server for one execution at a time, which ends with this. Raises SandboxStartError and ImportError."""
    from ctpo_sandbox import start_server

    with (
        temporary.folder("ctpo-check-") as folder,
        start_server(
            slots=1,
            limits=limits,
            start_timeout_s=START_TIMEOUT_S,
            log_path=LogPaths(folder).sandbox,
            require=require,
            tiers=["stdlib"],
        ) as server,
    ):
        yield server


def check_libraries(sandbox: SandboxConfig, rollout: RolloutConfig) -> list[Problem]:
    """Return what programs may expect to import and the sandbox of a run lacks; a server that runs is asked."""
    if not rollout.needs_sandbox:
        return []
    if sandbox.url is None and not names_a_server():
        return list(_lacking(absent(), "the sandbox that a run starts"))
    try:
        urls = [node_sandbox_url()] if sandbox.url is None else sandbox.url.split(",")
        return [problem for url in urls for problem in _lacking(_not_installed(url), f"the sandbox {url}")]
    except (OSError, ValueError) as error:
        return [Problem("sandbox", str(error), "start it before the run", severity="warning")]


def _of_node() -> Iterator[Problem]:
    if problem := node_sandbox_problem():
        yield replace(problem, fix="logs/ of the node program say why it ended")
        return
    url = node_sandbox_url()
    yield passed("sandbox", f"this node's own answers at {url}")
    yield from _lacking(_not_installed(url), "it")


def node_sandbox_problem() -> Problem | None:
    """Return why this node's sandbox cannot be used; sends it a request."""
    try:
        url = node_sandbox_url()
        _not_installed(url)
    except OSError as error:
        return Problem("sandbox", f"{error} (CTPO_SANDBOX_URL)")
    except (LookupError, ValueError) as error:
        return Problem("sandbox", str(error.args[0]))
    return None


def _not_installed(url: str) -> list[str]:
    """Libraries that programs may expect and the server at `url` lacks, as its `/health` says.

    Raises OSError when it does not answer, ValueError as `authorization`.
    """
    import httpx

    headers = authorization()
    try:
        answer = httpx.get(f"{url}/health", headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        return [str(name) for name in answer.raise_for_status().json().get("not_installed", ())]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise OSError(f"the sandbox {url} does not answer: {error}") from error


def _lacking(names: Sequence[str], whose: str) -> Iterator[Problem]:
    """A warning that programs will miss these libraries, if there are any."""
    if names:
        message = f"{whose} lacks {', '.join(names)}: programs that import them fail, and the model learns not to"
        fix = "pip install 'ctpo-megatron[sandbox-math]' into the server's environment"
        yield Problem("sandbox", message, fix, severity="warning")
