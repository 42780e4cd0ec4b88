"""`ctpo trajectories`: the trajectories that a run has written, as JSON lines."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection
from pathlib import Path

from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES
from ctpo_megatron.cli.errors import UsageError

_STANDARD_OUTPUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write trajectories of a run as JSON lines. docs/reference/dumps.md explains every field."
    parser.add_argument("directory", type=Path, metavar="RUN", help="run directory, e.g. runs/quickstart")
    parser.add_argument(
        "--jsonl", type=Path, required=True, metavar="FILE", help="file to write, which must not be there; -: print"
    )
    parser.add_argument("--steps", metavar="LIST", help="such as 1,20-24; default: all")
    parser.add_argument("--evaluations", action="store_true", help="held-out answers instead of trained trajectories")


def run(args: argparse.Namespace) -> int:
    """Write the file; say how many trajectories of how many steps it has."""
    from ctpo_megatron.tracking import trajectory_files

    files = trajectory_files(args.directory, EVALUATION if args.evaluations else TRAJECTORIES)
    if not files:
        what = "held-out answers" if args.evaluations else "trajectories"
        raise UsageError(f"{args.directory} has no {what} (tracking.trajectories; steps of a run are there when done)")
    chosen = {step: files[step] for step in _steps(args.steps, files)}
    count = _write(chosen, args.jsonl)
    print(f"{count:,} trajectories of {len(chosen)} steps: {args.jsonl}", file=sys.stderr)
    return 0


def _write(files: dict[int, Path], output: Path) -> int:
    from ctpo_megatron.base.files import aside
    from ctpo_megatron.tracking import export_lines

    if output == _STANDARD_OUTPUT:
        return export_lines(files, sys.stdout)
    if output.exists():
        raise UsageError(f"{output} exists; nothing is overwritten: choose another --jsonl")
    if not output.absolute().parent.is_dir():
        raise UsageError(f"{output.parent} is no folder: make it, or choose another --jsonl")
    with aside(output) as written, written.open("w", encoding="utf-8") as file:
        return export_lines(files, file)


def _steps(given: str | None, there: Collection[int]) -> list[int]:
    """The steps of a list such as 1,20-24, all of which must be there; all without a list."""
    if given is None:
        return sorted(there)
    found = set[int]()
    for part in given.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)):
            raise UsageError(f"--steps {given}: {part!r} is no step and no range such as 20-24")
        first, last = int(match[1]), int(match[2] or match[1])
        inside = {step for step in there if first <= step <= last}
        if not inside:
            raise UsageError(f"--steps {given}: no step {part.strip()} is there, only {min(there)} to {max(there)}")
        found |= inside
    return sorted(found)
