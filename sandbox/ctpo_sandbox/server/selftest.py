"""Runs hostile snippets through the real code path at start, so that the server reports verified protections."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ctpo_sandbox.errors import LevelRefused, RunFault, SandboxStartError
from ctpo_sandbox.isolation.remove import remove_tree
from ctpo_sandbox.records import LEVELS
from ctpo_sandbox.server.channel import run_files
from ctpo_sandbox.server.pool import Pool, RunResult
from ctpo_sandbox.timeouts import SELFTEST_TIMEOUT_S

PROTECTIONS = {
    "network": "no sockets but an unconnected UNIX stream pair",
    "processes": "no new processes; one kill ends a run",
    "signals": "no signals to other processes",
    "file writes": "no writes outside the run's own directory",
    "file reads": "no reads outside the interpreter and the system libraries",
    "memory": "address space limit",
    "disk": "limit on the files of a run together",
    "process list": "no other processes to be seen",
    "neighbours": "no memory or files of other runs to be read",
    "interfaces": "no network interface but its own loopback",
}
_FILES = ("network", "processes", "signals", "memory", "file writes", "file reads", "disk", "neighbours")
PROMISES = {
    "namespaces-root": tuple(PROTECTIONS),
    "namespaces-user": tuple(PROTECTIONS),
    "landlock": _FILES,
    "none": ("memory",),
}
"""What each level must be verified to enforce before it is used."""

REQUIREMENTS = {"namespaces": 2, "landlock": 3, "none": 4}
"""How many of `LEVELS`, starting with the strongest, satisfy `--require`."""

WAYS = (
    "allow Landlock or user namespaces here; or set --require none (sandbox.require) inside a virtual machine or "
    "gVisor that may be lost; or name a sandbox on another machine (sandbox.url)"
)

NEVER_ENFORCED = (
    "reading the packages of the server's environment",
    "kernel vulnerabilities and side channels (no virtual machine)",
)
_SNIPPET = """
import json, os, resource, socket, time

def refused(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def new_process():
    if os.fork() == 0:
        os._exit(0)

def write(path):
    with open(path, "w"):
        pass
    os.remove(path)

def others():
    try:
        return [name for name in os.listdir("/proc") if name.isdigit() and int(name) not in (os.getpid(), os.getppid())]
    except OSError:
        return []

def readable(process):
    places = [f"/proc/{process}/{name}" for name in ("mem", "environ", "maps", "cwd/secret", "fd/3")]
    return not all(refused(open, place, "rb") for place in places)

time.sleep(0.05)  # until its worker has looked at it
print(json.dumps({
    "network": refused(socket.socket, socket.AF_INET) and refused(socket.socket, socket.AF_UNIX),
    "processes": refused(new_process),
    "signals": refused(os.kill, os.getppid(), 0),
    "file writes": refused(write, "../selftest") and refused(write, SERVERS + "/selftest"),
    "file reads": refused(os.listdir, SERVERS) and refused(open, "/etc/passwd"),
    "memory": refused(bytearray, 1 << 44),
    "process list": others() == [] and refused(open, "/proc/1/environ"),
    "neighbours": not any(readable(process) for process in others()),
    "interfaces": refused(os.listdir, "/sys/class/net"),
}))
"""


_FILL = """
import time
for number in range(DISK_MB + 1):
    with open(f"fill-{number}", "wb") as file:
        file.write(bytes(1 << 20))
time.sleep(3600)  # where nothing refuses the last one, something has to end it
"""

_NEIGHBOUR = """
import time
file = open("secret", "w")
file.write("secret")
file.flush()
print("here", flush=True)
time.sleep(3600)
"""


def candidates(requirement: str, level: str | None) -> list[str]:
    """Levels to try, the strongest first; `level` forces one. Raises SandboxStartError when it does not suffice."""
    enough = list(LEVELS)[: REQUIREMENTS[requirement]]
    if level is None:
        return enough
    if level not in enough:
        raise SandboxStartError(f"--level {level} does not satisfy --require {requirement}; levels that do: {enough}")
    return [level]


async def measure(pool: Pool) -> dict[str, bool]:
    """Which of `PROTECTIONS` are effective.

    Raises LevelRefused when a protection that the pool's level promises is not, RunFault when the test cannot
    run.
    """
    given = f"SERVERS, DISK_MB = {str(pool.root)!r}, {pool.limits.disk_mb}"
    async with _neighbour(pool):
        run = await _run(pool, f"{given}\n{_SNIPPET}")
    if run.outcome.exit_code != 0:
        reason = run.outcome.killed_for or f"with {run.outcome.exit_code}"
        raise RunFault(f"the self-test ended {reason}: {run.stderr[-2000:]}")
    answers = json.loads(run.stdout)
    filled = await _run(pool, f"DISK_MB = {pool.limits.disk_mb}\n{_FILL}")
    answers["memory"] &= await _memory_is_held(pool)
    answers["disk"] = "No space left" in filled.stderr or filled.outcome.killed_for != ""
    found = {name: bool(answers[name]) for name in PROTECTIONS}
    broken = [name for name in PROMISES[pool.level] if not found[name]]
    if broken:
        raise LevelRefused(f"the self-test got through: {', '.join(broken)}")
    return found


async def _memory_is_held(pool: Pool) -> bool:
    """Whether a run that uses more memory than the limit is ended, even if it may map more."""
    limits = pool.limits
    if not limits.needs_group:
        return True
    run = await _run(pool, f"bytearray({limits.memory_mb + 2 * limits.disk_mb} << 20)")
    return run.outcome.exit_code != 0


async def _run(pool: Pool, code: str) -> RunResult:
    try:
        return await pool.run(code, "", SELFTEST_TIMEOUT_S)
    except RunFault as error:
        if isinstance(error.__cause__, LevelRefused):  # no worker could be confined
            raise error.__cause__ from None
        raise


@asynccontextmanager
async def _neighbour(pool: Pool) -> AsyncIterator[None]:
    """A concurrent run on a separate worker, with memory and a file that the test tries to find."""
    worker = pool.spare_worker()
    try:
        await worker.ensure_started()
        with run_files(_NEIGHBOUR.encode(), b"") as files:
            run = asyncio.ensure_future(worker.run(files, SELFTEST_TIMEOUT_S))
            try:
                while os.fstat(files[2]).st_size == 0:
                    if run.done():
                        raise RunFault(f"the neighbour of the self-test ended: {run.exception() or run.result()}")
                    await asyncio.sleep(0.005)  # it prints within milliseconds
                yield
            finally:
                run.cancel()
                await asyncio.gather(run, return_exceptions=True)
    finally:
        await asyncio.to_thread(remove_tree, worker.kill())


def explain(requirement: str, refused: dict[str, str]) -> str:
    """Return why no level is available, and what to do."""
    reasons = "; ".join(f"{level}: {reason}" for level, reason in refused.items())
    return (
        f"no isolation that satisfies --require {requirement} ({reasons}). Install libseccomp2 and pyseccomp; {WAYS}."
    )
