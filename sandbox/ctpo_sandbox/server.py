"""The server process: arguments, socket, start-up checks, and an end together with its parent."""

import argparse
import asyncio
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from ctpo_sandbox.app import ServerState, create_app
from ctpo_sandbox.pool import Pool, PoolUnavailable, WorkerLost
from ctpo_sandbox.records import Limits
from ctpo_sandbox.selftest import REQUIREMENTS, NotEnforceable, check, measure

_SHUTDOWN_TIMEOUT_S = 2
_BACKLOG = 2048
_log = logging.getLogger("ctpo_sandbox.server")


def _positive(kind: type[int] | type[float]):
    def parse(text: str) -> float:
        value = kind(text)
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    return parse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ctpo sandbox serve`."""
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; anything but loopback has no login")
    parser.add_argument("--port", type=int, default=8080, help="0: any free port, see --announce")
    parser.add_argument("--slots", type=_positive(int), default=2, help="executions at once")
    parser.add_argument("--memory-mb", type=_positive(int), default=512, help="address space of one execution")
    parser.add_argument("--max-run-timeout", type=_positive(float), default=60.0, metavar="S")
    parser.add_argument("--announce", type=Path, metavar="FILE", help="write the URL here once the server is ready")
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this process ends")
    parser.add_argument(
        "--require", choices=sorted(REQUIREMENTS), default="network", help="refuse to start without this isolation"
    )


def _watch_parent(pid: int, server: uvicorn.Server) -> None:
    """A pidfd, not PR_SET_PDEATHSIG: that signal comes when the starting thread ends, and trainers have threads."""
    descriptor = os.pidfd_open(pid)

    def stop() -> None:
        _log.error("parent process %d ended, so does the sandbox", pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        server.should_exit = server.force_exit = True

    asyncio.get_running_loop().add_reader(descriptor, stop)


def _announce(path: Path, url: str) -> None:
    aside = path.with_name(path.name + ".part")
    aside.write_text(url + "\n")
    aside.replace(path)


async def _serve(args: argparse.Namespace, listener: socket.socket) -> None:
    pool = Pool(slots=args.slots, limits=Limits(memory_mb=args.memory_mb))
    try:
        await pool.start()
        enforced = await measure(pool)
        check(enforced, args.require, pool.missing)
        state = ServerState(args.max_run_timeout, args.memory_mb, enforced)
        config = uvicorn.Config(
            create_app(pool, state),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
        )
        server = uvicorn.Server(config)
        if args.parent_pid is not None:
            _watch_parent(args.parent_pid, server)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _log.warning(
            "sandbox at %s: %d slots, %d MB each, require=%s. NOT ENFORCED: %s.",
            url, args.slots, args.memory_mb, args.require, "; ".join(state.not_enforced),
        )  # fmt: skip
        if args.announce is not None:
            _announce(args.announce, url)
        await server.serve(sockets=[listener])
    finally:
        pool.close()


def _exit_on(number: int, _: object) -> None:
    """uvicorn raises a caught signal again when it is done; the default action would skip the pool's clean-up."""
    raise SystemExit(128 + number)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or the end of the parent; the exit status. Failures to start are printed, not raised."""
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on)
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        with socket.create_server((args.host, args.port), family=family, backlog=_BACKLOG) as listener:
            asyncio.run(_serve(args, listener))
    except (NotEnforceable, PoolUnavailable, WorkerLost, OSError) as error:
        print(f"ctpo sandbox did not start: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m ctpo_sandbox.server`."""
    parser = argparse.ArgumentParser(prog="ctpo_sandbox.server", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
