"""`ctpo theory`: the theory of the paper, by exact enumeration of a small tree and by simulation."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctpo_megatron.cli.errors import UsageError, make_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show the theory of CTPO by enumeration and simulation. docs/theory.md explains every table."
    parser.add_argument("--out", type=Path, metavar="DIR", help="write theory.json and figures (PNG, SVG, PDF) there")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of trees and simulations (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=3, metavar="V", help="tokens of the tree (%(default)s)")
    parser.add_argument("--horizon", type=int, default=4, metavar="H", help="length of its sequences (%(default)s)")
    parser.add_argument(
        "--shift", type=float, default=0.7, metavar="X", help="of the target's logits, times N(0, 1) (%(default)s)"
    )
    parser.add_argument(
        "--sigma", type=float, default=0.0387, metavar="X", help="std of a token's log-ratio, nats (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=20_000, metavar="N", help="sequences and walks of a simulation (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print every table; with --out, write them and the figures."""
    from ctpo_megatron.cli.console import print_numbers
    from ctpo_megatron.theory import StudySettings, study, write_study

    settings = StudySettings(args.seed, args.vocabulary, args.horizon, args.shift, args.sigma, args.samples)
    if problems := list(settings.problems()):
        raise UsageError("\nctpo theory: ".join(problems))
    if args.out is not None:
        make_folder(args.out, f"--out {args.out}", "folder")
    found = study(settings)
    for table in found.tables:
        print_numbers(table.title, table.says, table.columns, table.rows)
    if args.out is not None:
        print()
        for path in write_study(found, args.out):
            print(path)
    return 0
