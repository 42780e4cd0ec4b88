"""`ctpo sandbox`: runs the code execution service alone, or checks a running one."""

from __future__ import annotations

import argparse

from ctpo_sandbox import server


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


def _serve(args: argparse.Namespace) -> int:
    return server.run(args) or 0


def _smoke(args: argparse.Namespace) -> int:
    from ctpo_sandbox import smoke

    return smoke.run(args.url)
