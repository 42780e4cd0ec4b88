"""`ctpo sweep`: every configuration of a grid, one run after the other, from one SFT; the same line continues it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from contextlib import suppress

from ctpo_megatron.base.run_paths import SweepPaths
from ctpo_megatron.cli.compare import show_comparison
from ctpo_megatron.cli.console import print_table, print_warnings
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import Job, Problem, world_size
from ctpo_megatron.preflight import ROWS, Findings, has_cuda_device
from ctpo_megatron.sweep import (
    PlannedRun,
    Runner,
    Sweep,
    SweepOutcome,
    SweepRecord,
    check,
    check_rows,
    is_done,
    plan,
    read_grid,
    train_command,
)
from ctpo_sandbox.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run the product of several values of some keys, e.g. --grid objective.preset=ctpo,grpo."
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as for ctpo train")
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="overrides of all runs, as for ctpo train"
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        required=True,
        metavar="a.b=c,d",
        help="keys with their values; one with a single value is an override",
    )
    parser.add_argument(
        "--sft",
        choices=("once", "each"),
        default="once",
        help="one SFT for all runs, with the configuration's own seed (default), or one for each value of run.seed",
    )
    parser.add_argument(
        "--ranks",
        type=positive(int),
        default=1,
        metavar="N",
        help="trainer ranks of each run, by torchrun, on this node",
    )
    parser.add_argument("--dry-run", action="store_true", help="check all configurations, print the runs, start none")


def run(args: argparse.Namespace) -> int:
    """Check all configurations, then run them, or print what would run."""
    if world_size() > 1 or "RANK" in os.environ:
        raise UsageError("starts the ranks of each run itself: start it without torchrun, with --ranks N")
    sweep = plan(args.config, read_grid(args.grid, [*args.overrides, *args.unknown]), args.sft)
    job = Job(args.ranks, args.ranks if args.ranks > 1 else None)
    print_warnings(_checked(sweep, job, args.dry_run))
    if args.dry_run:
        _print_plan(sweep)
        return 0
    record = SweepRecord.of(sweep, args.config)
    runner = Runner(sweep, record, train_command(args.config, args.ranks), leads=args.ranks > 1)
    try:
        outcome = runner.run()
    except BlockingIOError as owner:
        raise UsageError(
            f"{sweep.directory} is being swept by {owner}: wait until that has ended, or end it"
        ) from owner
    return _report(sweep, outcome, record, args)


def _checked(sweep: Sweep, job: Job, dry_run: bool) -> list[Problem]:
    """The warnings of all checks. Raises ConfigError with everything that is wrong."""
    found = Findings()
    found.take(lambda: check(sweep, job, cuda=has_cuda_device()))
    if dry_run:
        found.take(lambda: check_rows(sweep, ROWS))
    found.raise_if_any()
    return found.warnings


def _print_plan(sweep: Sweep) -> None:
    rows = [(run.name, _state(run), _from(sweep, run)) for run in sweep.all]
    print_table(
        f"{len(sweep.runs)} runs in {sweep.directory}, one after the other", ("run", "state", "what differs"), rows
    )


def _state(run: PlannedRun) -> str:
    return "finished" if is_done(run) else "to be continued" if run.directory.exists() else "new"


def _from(sweep: Sweep, run: PlannedRun) -> str:
    if run.name in sweep.sfts:
        return f"SFT of seed {run.config.run.seed}" + (f", {run.shown}" if run.values else "")
    return run.shown + (f", from {run.sft}" if run.sft and len(sweep.sfts) > 1 else "")


def _report(sweep: Sweep, outcome: SweepOutcome, record: SweepRecord, args: argparse.Namespace) -> int:
    """Say how the sweep ended, and compare the finished runs; returns the exit status."""
    states = Counter[str](each.state for each in record.runs)
    stopped = outcome.status > 1
    if stopped:
        with suppress(OSError):  # the terminal may be closed
            print(f"{_counted(states)}; continue with: {_command(args)}", file=sys.stderr)
        return outcome.status
    rows = [(each.name, each.state, outcome.failed.get(each.name, "")) for each in [*record.sft_runs, *record.runs]]
    print_table(f"{sweep.directory}: {_counted(states)}", ("run", "state", ""), rows)
    if outcome.failed:
        print(f"try what failed again with: {_command(args)}", file=sys.stderr)
    if len(outcome.finished) > 1:
        show_comparison([run.directory for run in outcome.finished], SweepPaths(sweep.directory).comparison)
    return outcome.status


def _counted(states: Counter[str]) -> str:
    return f"{states.total()} runs, " + ", ".join(f"{count} {state}" for state, count in states.items())


def _command(args: argparse.Namespace) -> str:
    """The command that continues this sweep."""
    options = [
        *(("--sft", args.sft) if args.sft != "once" else ()),
        *(("--ranks", str(args.ranks)) if args.ranks > 1 else ()),
    ]
    return shlex.join(["ctpo", "sweep", args.config, *args.overrides, *args.unknown, *options, "--grid", *args.grid])
