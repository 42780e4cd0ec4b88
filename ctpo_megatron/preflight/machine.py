"""This machine against what a run needs: sizes and limits, Python and its folders, what the sandbox enforces."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import (
    GIB,
    NO_VALUE,
    Problem,
    RolloutConfig,
    SandboxConfig,
    Severity,
    available_cores,
    passed,
)
from ctpo_megatron.environments import names_a_server, needs_sandbox, node_sandbox_url
from ctpo_megatron.preflight.check import Check, MachineContext, Wanted
from ctpo_megatron.preflight.disk import disk_problem
from ctpo_megatron.preflight.timeouts import CONNECT_TIMEOUT_S, SANDBOX_START_TIMEOUT_S
from ctpo_sandbox import temporary
from ctpo_sandbox.libraries import absent
from ctpo_sandbox.variables import authorization

if TYPE_CHECKING:
    from ctpo_sandbox import Limits, SandboxServer

_OPEN_FILES = (1024, 65536)
"""Fewer are not enough for Ray and an engine; Ray advises the second."""
_LONGEST = 107 - len("/ctpo-c0ffeec0ffee/c0ffee00-0000-4000-8000-c0ffee000000")
"""Longest temporary directory, given the folder of a run in it and vLLM's socket names; multiprocessing's are shorter.
"""
_SHARED_MEMORY = GIB / 2
"""Bytes that are to be free there."""
NODE = "node"
"""In place of a least isolation: the node of a cluster has a sandbox that runs already."""


def check_machine(context: MachineContext) -> Iterator[Problem]:
    """Cores, memory, shared memory, disks, open files, ports."""
    wanted = context.wanted
    yield passed("cores", f"{available_cores()}")
    yield _memory(max(wanted.host_bytes, wanted.weight_bytes), wanted.expected_bytes)
    if os.path.isdir(wanted.shared_memory):
        yield _shared_memory(wanted)
    yield from (disk_problem(f"disk of {needs.folder}", needs) for needs in wanted.disk)
    for problem in check_temporary(context):
        yield Problem("temporary directory", str(replace(problem, fix="")), problem.fix)
    yield _open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from (_port(host, port, whose) for host, port, whose in wanted.ports)
    yield from (_server(host, port, whose) for host, port, whose in wanted.servers)


def weight_bytes(model: Path) -> int:
    """Bytes of the weights of a Hugging Face model directory."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _memory(host_bytes: float, expected_bytes: float) -> Problem:
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fix = "a smaller model, policy.use_distributed_optimizer over more nodes, less policy.offload, or another machine"
    if host_bytes > have:
        return Problem("memory", f"{_gib(have)}, but weights and optimizer alone take {_gib(host_bytes)}", fix)
    if expected_bytes > have:
        fix = f"less policy.micro_batch_tokens, {fix}"
        return Problem("memory", f"{_gib(have)}, and a run may take {_gib(expected_bytes)}", fix, severity="warning")
    return passed("memory", f"{_gib(have)}" + (f", a run takes about {_gib(expected_bytes)}" if expected_bytes else ""))


def _shared_memory(wanted: Wanted) -> Problem:
    free = shutil.disk_usage(wanted.shared_memory).free
    if free >= _SHARED_MEMORY:
        return passed("/dev/shm", f"{_gib(free)} free")
    fix = "Ray's objects and NCCL pass through it: docker run --shm-size 2g"
    return Problem("/dev/shm", f"{_gib(free)} free", fix, severity="warning")


def _open_files(limits: tuple[int, int]) -> Problem:
    soft, hard = limits
    least, advised = _OPEN_FILES
    fix = f"ulimit -n {advised} before the start; for more than {hard}: LimitNOFILE= of the service, docker --ulimit"
    if 0 <= soft < least:
        return Problem("open files", f"{soft} at most; Ray and an engine need {least}", fix)
    if 0 <= soft < advised:
        return Problem("open files", f"{soft} at most; Ray advises {advised}", fix, severity="warning")
    return passed("open files", f"{soft} at most" if soft >= 0 else "no limit")


def _port(host: str, port: int, whose: str) -> Problem:
    try:
        with socket.create_server((host, port)):
            return passed(f"port {port}", f"free, for {whose}")
    except OSError as error:
        fix = "end who listens there (ss -ltnp), or configure another port"
        return Problem(f"port {port}", f"{host}:{port} of {whose}: {os.strerror(error.errno or 0)}", fix)


def _server(host: str, port: int, whose: str) -> Problem:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S):
            return passed(whose, f"{host}:{port} answers")
    except OSError as error:
        fix = "start it, or look at address and firewall"
        return Problem(whose, f"{host}:{port} does not answer: {error.strerror or error}", fix)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def check_docstrings(_context: object) -> Iterator[Problem]:
    """Whether Python leaves out docstrings, to which Ray adds when it is imported."""
    if sys.flags.optimize < 2:
        return
    message = "leaves out docstrings, without which Ray does not start"
    yield Problem("PYTHONOPTIMIZE", message, "type unset PYTHONOPTIMIZE, or leave out -OO", sys.flags.optimize)


def check_temporary(_context: object) -> Iterator[Problem]:
    """Whether engines and scorers can have their files and sockets in the temporary directory."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        given = os.environ.get("TMPDIR", NO_VALUE)
        yield Problem("TMPDIR", f"{error.strerror}", "set it to a folder that can be written to", given)
        return
    if (length := len(os.fsencode(folder))) > _LONGEST:
        message = f"has {length} characters, and sockets below it fail beyond {_LONGEST}"
        yield Problem("TMPDIR", message, "set it to a shorter path, e.g. /tmp", folder)


def check_sandbox(context: MachineContext) -> list[Problem]:
    """Its isolation. One that does not start is only a warning where none is wanted."""
    require = context.wanted.sandbox
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
    """A server for one execution at a time, which ends with this. Raises SandboxStartError and ImportError."""
    from ctpo_sandbox import start_server

    with (
        temporary.folder("ctpo-check-") as folder,
        start_server(
            slots=1,
            limits=limits,
            start_timeout_s=SANDBOX_START_TIMEOUT_S,
            log_path=LogPaths(folder).sandbox,
            require=require,
            tiers=["stdlib"],
        ) as server,
    ):
        yield server


def check_libraries(sandbox: SandboxConfig, rollout: RolloutConfig) -> list[Problem]:
    """What programs may expect to import and the sandbox of a run lacks; a server that runs is asked."""
    if not needs_sandbox(rollout):
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
    """Why this node's sandbox cannot be used; sends it a request."""
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
        # Ten seconds: it answers at once, unless its node is overloaded.
        answer = httpx.get(f"{url}/health", headers=headers, timeout=10, trust_env=False).raise_for_status()
        return [str(name) for name in answer.json().get("not_installed", ())]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise OSError(f"the sandbox {url} does not answer: {error}") from error


def _lacking(names: Sequence[str], whose: str) -> Iterator[Problem]:
    """A warning that programs will miss these libraries, if there are any."""
    if names:
        message = f"{whose} lacks {', '.join(names)}: programs that import them fail, and the model learns not to"
        fix = "pip install 'ctpo-megatron[sandbox-math]' into the server's environment"
        yield Problem("sandbox", message, fix, severity="warning")


START_CHECKS: tuple[Check[None], ...] = (check_docstrings, check_temporary)
"""Of this process, before it starts anything."""
