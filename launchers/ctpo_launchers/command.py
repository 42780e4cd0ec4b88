"""A command of `ctpo` as a job runs it, in the folder in which it was typed (`ctpo launch eval -- ...`)."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

COMMANDS = ("eval",)
"""Verbs of `ctpo` that are a job of one node, besides training."""


def main(argv: Sequence[str]) -> int:
    """Replace this process by `ctpo VERB ...`; returns 2 where the folder is not on this node."""
    parser = argparse.ArgumentParser(prog="python -m ctpo_launchers.command", description=__doc__)
    parser.add_argument("--workdir", required=True, metavar="DIR", help="go there first")
    parser.add_argument("words", nargs="+", metavar="WORD", help="verb and arguments of ctpo, after --")
    args = parser.parse_args(argv)
    try:
        os.chdir(args.workdir)
    except OSError as error:
        print(f"--workdir {args.workdir}: {error.strerror}: mount it on this node", file=sys.stderr)
        return 2
    os.execv(sys.executable, [sys.executable, "-m", "ctpo_megatron.cli", *args.words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
