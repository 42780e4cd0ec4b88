"""`ctpo compare`: several runs on one page, from their files alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.cli.report import add_figures, check_run

if TYPE_CHECKING:
    from ctpo_megatron.report import Comparison

PAGE = Path("comparison.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare runs: curves with the seeds of a configuration as mean and band, accuracies, rewards."
    parser.add_argument("directories", type=Path, nargs="+", metavar="RUN", help="run directory; two or more")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="PATH", help=f"the page (default: ./{PAGE})")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="R",
        help="count the steps to this mean reward of a step (default: halfway up)",
    )
    add_figures(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the runs, and write their figures where asked to."""
    for directory in args.directories:
        check_run(directory)
    if args.out.is_dir():
        raise UsageError(f"--out {args.out} is a directory; give a file, such as {args.out / PAGE}")
    compared = show_comparison(args.directories, args.out, args.threshold)
    if args.figures is not None:
        from ctpo_megatron.report import save_figures

        print(f"{len(save_figures(compared, args.figures))} files in {args.figures}")
    return 0


def show_comparison(runs: Sequence[Path], page: Path, threshold: float | None = None) -> Comparison:
    """Print the tables of endpoints and what to know of them, write the page, print its path.

    threshold: a mean reward, which steps are counted to; None: halfway up.
    """
    from ctpo_megatron.base.terminal import Terminal
    from ctpo_megatron.report import Comparison, difference_table, value_table, write_comparison

    compared = Comparison.load(runs, threshold)
    console = Terminal()
    groups, endpoints = compared.groups, compared.endpoints
    tables = (value_table(groups, endpoints), difference_table(groups, endpoints), compared.cost_table())
    for number, table in enumerate(filter(None, tables)):
        console.print(*([""] if number else []), table.drawn(), sep="\n")
    for note in compared.notes:
        console.print(f"- {note}", markup=False, highlight=False)
    print(f"The page with curves and settings: {write_comparison(compared, page)}")
    return compared
