"""The server process: arguments, socket, choice of isolation, and shutdown with its parent."""

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import importlib.metadata
import logging
import math
import os
import platform
import re
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from ctpo_sandbox.arguments import positive
from ctpo_sandbox.errors import LevelRefused, RunFault, SandboxStartError, WorkerLost
from ctpo_sandbox.front import configured, is_loopback, listen, url_of
from ctpo_sandbox.inside.libraries import absent, tiers
from ctpo_sandbox.isolation import libc
from ctpo_sandbox.records import LEVELS, Limits, option
from ctpo_sandbox.server.app import ServerState, create_app
from ctpo_sandbox.server.pool import Pool
from ctpo_sandbox.server.selftest import REQUIREMENTS, WAYS, candidates, explain, measure
from ctpo_sandbox.temporary import sweep
from ctpo_sandbox.timeouts import KEEP_ALIVE_S
from ctpo_sandbox.variables import TOKEN, TOKEN_FILE, shared_token

_VERSIONED = ("ctpo-megatron", "numpy", "sympy", "pyseccomp")
_OPEN_FILES, _LINUX = 65536, (5, 14)
_ON_FAILURE = (
    "On a slow machine or file system raise --start-timeout-s (sandbox.start_timeout_s), or import less: --tiers. No "
    "weaker isolation was tried"
)
_log = logging.getLogger("ctpo_sandbox.server")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `ctpo sandbox serve`."""
    parser.add_argument("--host", default="127.0.0.1", help=f"off loopback {TOKEN} or {TOKEN_FILE} must be set")
    parser.add_argument("--port", type=int, default=8080, help="0: any free port, see --announce")
    # Linux only, like the server; but its options can be listed anywhere.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--slots", type=positive(int), default=cores + 1, help="executions at once (default: cores + 1)"
    )
    parser.add_argument(
        "--max-waiting",
        type=positive(int),
        default=1024,
        metavar="N",
        help="requests that may wait for a slot; more are answered 503 with Retry-After (default: 1024)",
    )
    parser.add_argument(
        "--drain-s",
        type=positive(float),
        default=25.0,
        metavar="N",
        help="on SIGTERM, time to finish what was taken on (default: 25); SIGINT gives 2 seconds",
    )
    for limit in dataclasses.fields(Limits):
        kind = positive(float if limit.type is float else int)
        meaning = f"{limit.metadata['meaning']} (default: {limit.default})"
        parser.add_argument(option(limit.name), type=kind, default=limit.default, metavar="N", help=meaning)
    parser.add_argument("--announce", type=Path, metavar="FILE", help="write the URL here once the server is ready")
    parser.add_argument("--node", default=socket.gethostname(), help="name of this machine in GET /metrics (its own)")
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this process ends")
    parser.add_argument(
        "--require",
        type=_offered,
        choices=list(REQUIREMENTS),
        default="landlock",
        help="refuse to start with less isolation",
    )
    parser.add_argument(
        "--start-timeout-s",
        type=positive(float),
        default=60.0,
        metavar="N",
        help="deadline for a tier of libraries to be imported (default: 60)",
    )
    parser.add_argument(
        "--level",
        type=_offered,
        choices=list(LEVELS),
        help="use this level of isolation, not the strongest there is",
    )
    parser.add_argument("--tiers", default="", metavar="A,B", help="tiers to have, e.g. stdlib,numpy; default: all")
    parser.add_argument("--warm", default="", metavar="A,B", help="further modules to import ahead, e.g. scipy,pandas")


def _offered(level: str) -> str:
    """Refuse the level that there was, which left files open."""
    if level == "seccomp":
        raise argparse.ArgumentTypeError(f"seccomp alone is no level any more, as it left all files open: {WAYS}")
    return level


def _watch_parent(pid: int, server: uvicorn.Server) -> None:
    """With a pidfd: PR_SET_PDEATHSIG would fire when the starting thread ends, and trainers have threads.

    Raises SandboxStartError if it has ended already.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EINVAL):  # EINVAL: it is being reaped
            raise
        raise SandboxStartError(f"parent process {pid} (--parent-pid) has ended") from error

    def stop() -> None:
        _log.error("parent process %d ended, so does the sandbox", pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        # From Python 3.12 on closing a server waits for its connections, so for the runs that they ask for.
        server.config.timeout_graceful_shutdown = 0
        server.should_exit = server.force_exit = True

    asyncio.get_running_loop().add_reader(descriptor, stop)


def _announce(path: Path, url: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(url + "\n")
    aside.replace(path)


async def _isolated_pool(args: argparse.Namespace) -> tuple[Pool, dict[str, bool], dict[str, str]]:
    """A started pool at the strongest available level, what it enforces, and why stronger levels were refused.

    Raises SandboxStartError when no level satisfies `--require`, and for any other failure: that says nothing about the
    available isolation, so no weaker level is tried.
    """
    limits = Limits.of(args)
    _check_machine(limits)
    libraries = tiers(*(filter(None, names.split(",")) for names in (args.warm, args.tiers)))
    refused: dict[str, str] = {}
    for level in candidates(args.require, args.level):
        pool = Pool(
            slots=args.slots,
            limits=limits,
            level=level,
            libraries=libraries,
            start_timeout_s=args.start_timeout_s,
            max_waiting=args.max_waiting,
        )
        try:
            await pool.start()
            return pool, await measure(pool), refused
        except LevelRefused as error:
            pool.close()
            refused[level] = str(error)
        except (WorkerLost, RunFault) as error:
            pool.close()
            raise SandboxStartError(f"{error}. {_ON_FAILURE}") from error
        except BaseException:
            pool.close()
            raise
    raise SandboxStartError(explain(args.require, refused))


_OF_MACHINE = {
    "open_files": (resource.RLIMIT_NOFILE, "-Hn", 1),
    "threads": (resource.RLIMIT_NPROC, "-Hu", 1),
    "memory_mb": (resource.RLIMIT_AS, "-Hv", 1 << 20),
    "address_space_mb": (resource.RLIMIT_AS, "-Hv", 1 << 20),
    "file_mb": (resource.RLIMIT_FSIZE, "-Hf", 1 << 20),
}
"""A limit of a run -> the kernel's limit, the ulimit option, and the factor between their units."""


def _check_machine(limits: Limits) -> None:
    """Raises ValueError for a limit above this machine's hard limit, and for threads without room."""
    for name, (kind, shown_by, unit) in _OF_MACHINE.items():
        value, (_, hard) = getattr(limits, name), resource.getrlimit(kind)
        if value is not None and hard != resource.RLIM_INFINITY and value * unit > hard:
            allowed = f"this machine allows {hard // unit} (ulimit {shown_by})"
            raise ValueError(f"{option(name)} {value}: {allowed}; lower it")
    if limits.threads_too_many:
        raise ValueError(f"{option('threads')} {limits.threads}: {limits.threads_too_many}")


class _UvicornServer(uvicorn.Server):
    """SIGTERM stops accepting and finishes accepted requests; SIGINT hurries."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self.config.timeout_graceful_shutdown = 2  # seconds, for answers that are nearly ready
        super().handle_exit(sig, frame)


def _raise_open_files() -> None:
    """Every connection is an open file, and the default limit of 1024 is meant for programs that use select(2)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "kernel": platform.release(), "machine": platform.machine()}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # optional, or run from a source tree
            found[name] = importlib.metadata.version(name)
    return found


def _log_protections(url: str, pool: Pool, state: ServerState) -> None:
    _log.warning(
        "sandbox at %s: %d slots, %d MB each, isolation %s (%s). NOT ENFORCED: %s.",
        url, pool.slots, pool.limits.memory_mb, pool.level, LEVELS[pool.level], "; ".join(state.not_enforced),
    )  # fmt: skip
    if lacking := absent():
        _log.warning(
            "NOT INSTALLED: %s. Programs that import them fail: pip install 'ctpo-megatron[sandbox-math]' into %s",
            ", ".join(lacking), sys.prefix,
        )  # fmt: skip


async def _serve(args: argparse.Namespace, listener: socket.socket) -> None:
    pool, enforced, refused = await _isolated_pool(args)
    try:
        state = ServerState(enforced, shared_token(), refused, _versions())
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = configured(
            create_app(pool, state, args.node),
            most_files // 4,  # for moments three times as many; the rest is for workers
            timeout_keep_alive=KEEP_ALIVE_S,
            log_level="warning",
            timeout_graceful_shutdown=math.ceil(args.drain_s),
        )
        server = _UvicornServer(config)
        state.ends = lambda: server.should_exit
        if args.parent_pid is not None:
            _watch_parent(args.parent_pid, server)
        url = url_of(listener)
        _log_protections(url, pool, state)
        if args.announce is not None:
            _announce(args.announce, url)
        await server.serve(sockets=[listener])
    finally:
        pool.close()


def _check_platform(require: str) -> None:
    """Raises SandboxStartError if not on Linux: memory files and pidfds need it, and isolation needs 5.14 or newer.

    Earlier ones cannot hide the server from other processes of its user. What gVisor calls its release says nothing.
    """
    if sys.platform != "linux":
        raise SandboxStartError(
            f"the server runs on Linux only, not on {sys.platform}; start it in a Linux machine or VM"
        )
    release = platform.release()
    numbers = re.match(r"(\d+)\.(\d+)", release)
    if require != "none" and numbers and tuple(map(int, numbers.groups())) < _LINUX:
        raise SandboxStartError(f"this is Linux {release}, and isolation needs 5.14 or newer: {WAYS}")


def _check_address(host: str) -> None:
    """Raises SandboxStartError for an address that others can reach without a token, ValueError for a bad token."""
    if shared_token() is None and not is_loopback(f"[{host}]" if ":" in host else host):
        raise SandboxStartError(
            f"--host {host} is not a loopback address: anyone could run code. Set {TOKEN} to a secret that "
            f"clients send as a bearer token, or {TOKEN_FILE} to a file with it"
        )


def _exit_on(number: int, _: object) -> None:
    """uvicorn re-raises a caught signal at its end; the default action would skip the pool's cleanup."""
    raise SystemExit(128 + number)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or the parent's end; returns the exit status. Start failures are printed, not raised."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on)
    try:
        _check_platform(args.require)
        _check_address(args.host)
        sweep()
        libc.hide()
        _raise_open_files()
        with listen(args.host, args.port) as listener:
            asyncio.run(_serve(args, listener))
    except (SandboxStartError, OSError, ValueError) as error:
        print(f"ctpo sandbox did not start: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m ctpo_sandbox.server`."""
    parser = argparse.ArgumentParser(prog="ctpo_sandbox.server", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))
