"""`ctpo report`: the summary and the report of a run, from its files alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.cli.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Rebuild report.html."
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    add_figures(parser)


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Declare `--figures`."""
    told = "also write each figure there as PNG, SVG and PDF, in the width of a paper's column"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=told)


def check_run(directory: Path) -> None:
    """Raises UsageError for what is no run directory."""
    if not (config := RunPaths(directory).config).is_file():
        raise UsageError(f"{directory} is not a run directory: it has no {config.name}")


def run(args: argparse.Namespace) -> int:
    """Print the summary, write the report, print its path."""
    check_run(args.directory)
    from ctpo_megatron.report import Comparison, print_summary, save_figures, write_report

    print_summary(args.directory)
    print(write_report(args.directory))
    if args.figures is not None:
        print(f"{len(save_figures(Comparison.load([args.directory]), args.figures))} files in {args.figures}")
    return 0
