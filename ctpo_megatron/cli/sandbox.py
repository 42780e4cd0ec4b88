"""`ctpo sandbox`: runs the code execution service alone, checks a running one, or measures its speed."""

from __future__ import annotations

import argparse

from ctpo_sandbox import server
from ctpo_sandbox.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verbs of the sandbox."""
    parser.description = "Code execution service."
    actions = parser.add_subparsers(dest="sandbox_verb", metavar="VERB", required=True)
    serve = actions.add_parser("serve", help="serve until interrupted", description="Serve executions until ^C.")
    server.add_arguments(serve)
    serve.set_defaults(run=_serve)
    smoke = actions.add_parser("smoke", help="check a server before a training job", description="Check a server.")
    smoke.add_argument("--url", required=True, help="address of the server")
    smoke.set_defaults(run=_smoke)
    bench = actions.add_parser("bench", help="executions per second of a server", description="Time a server.")
    where = bench.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="address of the server")
    where.add_argument("--urls", metavar="URL,URL", help="of several; their balance and losses are shown, too")
    bench.add_argument("--seconds", type=positive(float), default=5.0, help="for each snippet at each concurrency")
    bench.add_argument("--concurrency", type=positive(int), nargs="+", default=[1, 8, 32], metavar="N")
    bench.set_defaults(run=_bench)


def _serve(args: argparse.Namespace) -> int:
    return server.run(args) or 0


def _smoke(args: argparse.Namespace) -> int:
    from ctpo_sandbox import smoke

    return smoke.run(args.url)


def _bench(args: argparse.Namespace) -> int:
    from ctpo_sandbox import bench

    return bench.run((args.url if args.urls is None else args.urls).split(","), args.seconds, args.concurrency)
