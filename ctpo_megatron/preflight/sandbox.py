"""What the sandbox enforces here, by starting one and asking it; or whether this node's own one answers."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import Problem, Severity, passed
from ctpo_megatron.environments.node_sandbox import names_a_server, node_sandbox_problem, node_sandbox_url
from ctpo_megatron.preflight.check import MachineContext
from ctpo_megatron.preflight.timeouts import SANDBOX_START_TIMEOUT_S

NODE = "node"
"""In place of a least isolation: the node of a cluster has a sandbox that runs already."""


def check_sandbox(context: MachineContext) -> list[Problem]:
    """Its isolation. One that does not start is only a warning where none is wanted."""
    require = context.wanted.sandbox
    if require == NODE or names_a_server():
        return [_of_node()]
    bad: Severity = "error" if require else "warning"
    fix = "docs/sandbox.md says what each level needs; sandbox.require takes less, sandbox.url another machine"
    try:
        from ctpo_sandbox import Limits, SandboxStartError, start_server
    except ImportError as error:
        return [Problem("sandbox", f"does not import: {error}", extra="sandbox", severity=bad)]
    with tempfile.TemporaryDirectory() as folder:
        log = LogPaths(Path(folder)).sandbox
        try:
            with start_server(
                slots=1,
                limits=Limits(run_timeout_s=5),
                start_timeout_s=SANDBOX_START_TIMEOUT_S,
                log_path=log,
                require=require or "landlock",
                tiers=["stdlib"],
            ) as server:
                health = server.health
        except SandboxStartError as error:
            return [Problem("sandbox", f"does not start: {error}", fix, severity=bad)]
    return [
        passed("sandbox", f"level {health['level']}: {'; '.join(health['enforced'])}"),
        Problem("  not enforced", "; ".join(health["not_enforced"]), severity="warning"),
    ]


def _of_node() -> Problem:
    if problem := node_sandbox_problem():
        return replace(problem, fix="logs/ of the node program say why it ended")
    return passed("sandbox", f"this node's own answers at {node_sandbox_url()}")
