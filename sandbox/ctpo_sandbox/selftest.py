"""Runs hostile snippets through the real path at start, so that the server states what it enforces, not hopes."""

import json

from ctpo_sandbox.pool import Pool, PoolUnavailable

PROTECTIONS = {
    "network": "no sockets but an unconnected UNIX stream pair",
    "processes": "no new processes; one kill ends a run",
    "signals": "no signals to other processes",
    "file writes": "no writes outside the run's own directory",
    "file reads": "no reads outside the interpreter and the system libraries",
    "memory": "address space limit",
}
REQUIREMENTS = {
    "none": (),
    "network": ("network", "processes"),
    "filesystem": ("network", "processes", "file writes", "file reads"),
}
NEVER_ENFORCED = (
    "total disk use of a run (each file is bounded)",
    "threads of a run (bounded by memory only)",
    "kernel vulnerabilities (no virtual machine)",
)
_TIMEOUT_S = 10.0
_SNIPPET = """
import json, os, socket

def refused(action, *arguments):
    try:
        action(*arguments)
    except (PermissionError, MemoryError):
        return True
    return False

def new_process():
    if os.fork() == 0:
        os._exit(0)

def write_above():
    with open("../selftest", "w"):
        pass
    os.remove("../selftest")

print(json.dumps({
    "network": refused(socket.socket, socket.AF_INET) and refused(socket.socket, socket.AF_UNIX),
    "processes": refused(new_process),
    "signals": refused(os.kill, os.getppid(), 0),
    "file writes": refused(write_above),
    "file reads": refused(os.listdir, "..") and refused(open, "/etc/passwd"),
    "memory": refused(bytearray, 1 << 44),
}))
"""


class NotEnforceable(Exception):
    """This machine lacks a protection that `--require` names."""


async def measure(pool: Pool) -> dict[str, bool]:
    """Which of `PROTECTIONS` hold here. Raises PoolUnavailable when not even the test can be run."""
    run = await pool.run(_SNIPPET.encode(), b"", _TIMEOUT_S)
    if run.outcome.exit_code != 0:
        raise PoolUnavailable(f"the self-test ended with {run.outcome.exit_code}: {run.stderr[-2000:]}")
    return {name: bool(json.loads(run.stdout)[name]) for name in PROTECTIONS}


def check(enforced: dict[str, bool], requirement: str, missing: dict[str, str]) -> None:
    """Raises NotEnforceable when `requirement` (a key of `REQUIREMENTS`) does not hold."""
    lacking = [name for name in REQUIREMENTS[requirement] if not enforced[name]]
    if lacking:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items()) or "no reason known"
        raise NotEnforceable(
            f"cannot enforce {', '.join(lacking)} on this machine ({reasons}). Install libseccomp2 and pyseccomp, or "
            "accept the risk with --require none: snippets then run with the rights of this user."
        )
