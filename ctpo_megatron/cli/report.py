"""`ctpo report`: the summary and the report of a run, or a page of chosen trajectories, from its files alone."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.data import TOOL_STATUSES
from ctpo_sandbox.arguments import positive

if TYPE_CHECKING:
    from ctpo_megatron.report import TrajectoryFilters

_FILTERS = ("steps", "text", "prompt", "reward", "tool", "finish")
_TOOLS = ("none", "failed", *TOOL_STATUSES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Rebuild report.html. With filters, write the trajectories that match to trajectories.html."
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    add_figures(parser)
    chosen = parser.add_argument_group("filters", "all of which a trajectory has to pass")
    chosen.add_argument("--steps", type=_steps, metavar="LIST", help="steps such as 1,20-24")
    chosen.add_argument("--text", help="in the prompt, an answer or tool output; case is ignored")
    chosen.add_argument("--prompt", metavar="ID", help="prompt id")
    chosen.add_argument("--reward", type=_reward, metavar="X", help="a reward, or none: without a verdict")
    chosen.add_argument("--tool", choices=_TOOLS, help="no call; calls of which none succeeded; the status of any call")
    chosen.add_argument("--finish", metavar="REASON", help="why it ended, such as answer, length or max_turns")
    chosen.add_argument("--evaluations", action="store_true", help="held-out answers instead of trained trajectories")
    chosen.add_argument(
        "--most", type=positive(int), default=50, metavar="N", help="trajectories on the page (%(default)s)"
    )


def add_figures(parser: argparse.ArgumentParser) -> None:
    """Declare `--figures`."""
    told = "also write each figure there as PNG, SVG and PDF, in the width of a paper's column"
    parser.add_argument("--figures", type=Path, metavar="DIR", help=told)


def check_run(directory: Path) -> None:
    """Raises UsageError for what is no run directory."""
    if not (config := RunPaths(directory).config).is_file():
        raise UsageError(f"{directory} is not a run directory: it has no {config.name}")


def run(args: argparse.Namespace) -> int:
    """Print the summary, write the report, print its path; or write the page of trajectories."""
    check_run(args.directory)
    from ctpo_megatron.report import Comparison, TrajectoryFilters, print_summary, save_figures, write_report

    given = {name: getattr(args, name) for name in _FILTERS}
    if args.evaluations or any(value is not None for value in given.values()):
        source: Literal["training", "evaluation"] = "evaluation" if args.evaluations else "training"
        return _write_trajectories(args, TrajectoryFilters(**given, source=source))
    print_summary(args.directory)
    print(write_report(args.directory))
    if args.figures is not None:
        print(f"{len(save_figures(Comparison.load([args.directory]), args.figures))} files in {args.figures}")
    return 0


def _write_trajectories(args: argparse.Namespace, filters: TrajectoryFilters) -> int:
    from ctpo_megatron.report import write_trajectories_page

    page, found = write_trajectories_page(args.directory, filters, args.most)
    if page is None:
        kind = "held-out answers" if args.evaluations else "trajectories"
        raise UsageError(f"{args.directory}: none of {found.searched:,} {kind} matches {filters}")
    print(f"{len(found.views):,} of {found.count:,} that match: {page}")
    return 0


def _steps(text: str) -> tuple[range, ...]:
    parts = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of steps such as 1,20-24")
    return tuple(range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part)


def _reward(text: str) -> float | Literal["none"]:
    if text == "none":
        return "none"
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no reward; give a number, or none") from None
