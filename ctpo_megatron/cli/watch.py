"""`ctpo watch`: the report and all trajectories of a run in a browser, also while the run continues."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ctpo_megatron.base.installed import install_command, is_installed
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.cli.report import check_run

_NEEDED = ("starlette", "uvicorn", "httptools", "pyarrow", "jinja2", "vl_convert")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a run on this machine's loopback, read only, until ^C. The run may continue meanwhile."
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    parser.add_argument("--host", default="127.0.0.1", help="a loopback address (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8484, help="0: any free port (default: 8484)")


def run(args: argparse.Namespace) -> int:
    """Serve; say the address."""
    check_run(args.directory)
    if missing := [name for name in _NEEDED if not is_installed(name)]:
        raise UsageError(f"{', '.join(missing)} missing: {install_command('sandbox')}")
    from ctpo_megatron.report.watch import WatchError, serve

    try:
        serve(args.directory, args.host, args.port, lambda url: print(f"{url}  (^C ends it)", file=sys.stderr))
    except WatchError as error:
        raise UsageError(str(error)) from error
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number up to 65535, or 0 for any free one")
    return int(text)
