"""`ctpo compare`: several runs on one page, from their files alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.cli.report import add_figures, check_run

PAGE = Path("comparison.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Compare runs: curves with the seeds of a configuration as mean and band, and accuracies."
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="run directory; two or more")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="PATH", help=f"the page (default: ./{PAGE})")
    add_figures(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare the runs, and write their figures where asked to."""
    for directory in args.directories:
        check_run(directory)
    if args.out.is_dir():
        raise UsageError(f"--out {args.out} is a directory; give a file, such as {args.out / PAGE}")
    show_comparison(args.directories, args.out)
    if args.figures is not None:
        from ctpo_megatron.report import save_figures

        print(f"{len(save_figures(args.directories, args.figures))} files in {args.figures}")
    return 0


def show_comparison(runs: Sequence[Path], page: Path) -> None:
    """Print the table of accuracies and what to know of it, write the page, print its path."""
    from rich.console import Console

    from ctpo_megatron.report import (
        RunData,
        compare_accuracies,
        comparison_table,
        groups_of,
        notes_of,
        notes_of_accuracies,
        write_comparison,
    )

    groups = groups_of([RunData.load(directory) for directory in runs])
    found = compare_accuracies(groups)
    console = Console()
    console.print(comparison_table(groups, found))
    for note in (*notes_of(groups), *notes_of_accuracies(found)):
        console.print(f"- {note}", markup=False, highlight=False)
    print(write_comparison(runs, page))
