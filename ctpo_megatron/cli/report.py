"""`ctpo report`: the summary and the report of a run, from its files alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.cli.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Rebuild report.html."
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the summary, write the report, print its path."""
    if not (config := RunPaths(args.directory).config).is_file():
        raise UsageError(f"{args.directory} is not a run directory: it has no {config.name}")
    from ctpo_megatron.report import print_summary, write_report

    print_summary(args.directory)
    print(write_report(args.directory))
    return 0
