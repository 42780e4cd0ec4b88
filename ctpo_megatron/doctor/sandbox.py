"""What the sandbox enforces here, by starting one and asking it; or whether this node's own one answers."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ctpo_megatron.doctor.findings import Finding, Status
from ctpo_megatron.environments.node_sandbox import names_a_server, node_sandbox_problem, node_sandbox_url

NODE = "node"
"""In place of a least isolation: the node of a cluster has a sandbox that runs already."""
_START_S = 60.0


def check_sandbox(require: str) -> list[Finding]:
    """Its isolation. require: the least that is wanted, or NODE; empty: one that does not start is only a note."""
    if require == NODE or names_a_server():
        return [_of_node()]
    bad: Status = "broken" if require else "note"
    fix = "docs/sandbox.md says what each level needs; sandbox.require takes less, sandbox.url another machine"
    try:
        from ctpo_sandbox import Limits, SandboxStartError, start_server
    except ImportError as error:
        return [Finding("sandbox", bad, f"does not import: {error}", extra="sandbox")]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sandbox.log"
        try:
            with start_server(
                slots=1,
                limits=Limits(run_timeout_s=5),
                start_timeout_s=_START_S,
                log_path=log,
                require=require or "landlock",
                tiers=["stdlib"],
            ) as server:
                health = server.health
        except SandboxStartError as error:
            return [Finding("sandbox", bad, f"does not start: {error}", fix)]
    return [
        Finding("sandbox", "ok", f"level {health['level']}: {'; '.join(health['enforced'])}"),
        Finding("  not enforced", "note", "; ".join(health["not_enforced"])),
    ]


def _of_node() -> Finding:
    if problem := node_sandbox_problem():
        return Finding("sandbox", "broken", problem, "logs/ of the node program say why it ended")
    return Finding("sandbox", "ok", f"this node's own answers at {node_sandbox_url()}")
