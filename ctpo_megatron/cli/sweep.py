"""`ctpo sweep`: every point of a grid, one `ctpo train` after the other; the same line continues it.

With `--tune` runs come first that pick values for each point (`cli/tune.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from ctpo_megatron.base.files import write_json
from ctpo_megatron.base.run_paths import TUNING, TUNING_RECORD
from ctpo_megatron.base.stop import heeded
from ctpo_megatron.checks import check_dry, has_cuda_device
from ctpo_megatron.cli.compare import show_comparison
from ctpo_megatron.cli.console import print_warnings
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.cli.grid import GridPoint, points_of, read_grid
from ctpo_megatron.cli.tune import Tuning, at_the_end, mean_reward, read_tuning, refuse_shared_seeds
from ctpo_megatron.config import Config, ConfigError, Job, Problem, accepted, load_with_sources, world_size
from ctpo_sandbox.arguments import positive
from ctpo_sandbox.isolation.libc import die_with_parent

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
_CLOSING_S = 120.0
"""For a run to close its engines and its sandbox, after `checkpoint.grace_s`."""
_OF_SFT = {"sft", "model", "run.seed", "data.system_prompt", "data.tool_in_prompt", "rollout.tool_parser"}
"""Keys, or sections, that an SFT model follows from."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run the product of several values of some keys, e.g. --grid objective.preset=ctpo,grpo."
    parser.add_argument("config", metavar="CONFIG", help="YAML file, as for ctpo train")
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="overrides of all runs, as for ctpo train"
    )
    parser.add_argument(
        "--grid", nargs="+", action="extend", required=True, metavar="a.b=c,d", help="keys with their values"
    )
    parser.add_argument(
        "--ranks", type=positive(int), default=1, metavar="N", help="trainer ranks of each run, by torchrun"
    )
    parser.add_argument(
        "--tune", nargs="+", action="extend", default=[], metavar="a.b=c,d", help="keys that each point gets a value of"
    )
    parser.add_argument("--tune-seeds", metavar="S,S", help="run.seed of the runs that such a value is picked by")
    parser.add_argument("--dry-run", action="store_true", help="check all configurations, print the runs, start none")


def run(args: argparse.Namespace) -> int:
    """Check all points, then train each; returns 1 if a run failed, and the status of a run that was stopped."""
    if world_size() > 1 or "RANK" in os.environ:
        raise UsageError("starts the ranks of each run itself: start it without torchrun, with --ranks N")
    grid, common = read_grid(args.grid, [*args.overrides, *args.unknown])
    tuning = read_tuning(args.tune, args.tune_seeds, grid, common)
    if tuning is not None:
        return _tune_and_compare(args, common, tuning)
    runs = _checked(args, common, points_of(grid))
    print(f"{len(runs)} runs in {_folder(runs)}: {', '.join(runs)}", flush=True)
    if _shares_sft(grid, runs):
        line = shlex.join(["ctpo", "train", args.config, *common, "run.name=sft", "run.steps=0"])
        print(f"SFT is the same in all of them. To do it once: {line}")
        print("and give the sweep: model.path=RUN/sft_model sft=null")
    return 0 if args.dry_run else _train_and_compare(args, runs)


@dataclass(frozen=True)
class _Run:
    """A run of the sweep, checked. words: its overrides."""

    config: Config
    words: list[str]


_Runs = dict[str, _Run]


def _folder(runs: _Runs) -> Path:
    return next(iter(runs.values())).config.run.directory.parent


def _tune_and_compare(args: argparse.Namespace, common: Sequence[str], tuning: Tuning) -> int:
    """Pick values for each point on tuning seeds, then compare the points with them; returns the exit status."""
    tuning_runs = _checked(args, common, tuning.tuning_runs(), below=TUNING)
    runs = _checked(args, common, tuning.compared_runs(tuning.first_values), warn=False)
    refuse_shared_seeds(*([run.config.run.seed for run in some.values()] for some in (tuning_runs, runs)))
    folder = _folder(runs)
    print(f"{len(tuning_runs)} runs to tune with, in {folder / TUNING}: {', '.join(tuning_runs)}")
    print(f"then {len(runs)} runs in {folder}, each with the values that were picked for its point", flush=True)
    if args.dry_run:
        return 0
    if status := _train_all(args, tuning_runs):
        if status not in STOPPED:
            print("nothing is picked: leave values out that cannot be trained with", file=sys.stderr)
        return status
    picks = tuning.pick(lambda name: mean_reward(tuning_runs[name].config.run.directory))
    for pick in picks:
        print(f"[tune] {pick}", flush=True)
    print_warnings([*at_the_end(picks, tuning)])
    write_json(folder / TUNING_RECORD, tuning.record(picks))
    picked = {pick.name: pick.values for pick in picks}
    points = tuning.compared_runs(lambda point: picked[tuning.name(point)])
    return _train_and_compare(args, _checked(args, common, points, warn=False))


def _train_and_compare(args: argparse.Namespace, runs: _Runs) -> int:
    """Train all runs and compare those that finished; returns the exit status."""
    failed = dict[str, int]()
    status = _train_all(args, runs, failed)
    if status in STOPPED:
        return status
    finished = [run.config.run.directory for name, run in runs.items() if name not in failed]
    if len(finished) > 1:
        show_comparison(finished, _folder(runs) / "comparison.html")
    return status


def _train_all(args: argparse.Namespace, runs: _Runs, failed: dict[str, int] | None = None) -> int:
    """Train one run after the other; returns 1 if one failed, and the status of a run that was stopped.

    failed: gets the names of those that failed, with their statuses.
    """
    failed = {} if failed is None else failed
    for name, run in runs.items():
        print(f"[sweep] {name}", flush=True)
        status = _train(args.config, run.words, args.ranks, run.config.checkpoint.grace_s)
        if status in STOPPED:
            print(f"stopped in {run.config.run.directory}; the same command continues", file=sys.stderr)
            return status
        if status:
            failed[name] = status
    for name, status in failed.items():
        print(f"{name} failed with exit status {status}; the same command tries it again", file=sys.stderr)
    return int(bool(failed))


def _checked(
    args: argparse.Namespace, common: Sequence[str], points: Mapping[str, GridPoint], below: str = "", warn: bool = True
) -> _Runs:
    """Return the run of each point, once a dry run finds nothing wrong with any.

    below: folder of the runs, in the folder of the sweep. warn: whether warnings are printed. Raises ConfigError with
    what is wrong with all of them.
    """
    checked, job = _Runs(), Job(args.ranks, args.ranks if args.ranks > 1 else None, cuda=has_cuda_device())
    wrong, warnings = list[tuple[str, Problem]](), list[tuple[str, Problem]]()
    for name, point in points.items():
        own = [f"{key}={value}" for key, value in point.items()]
        try:
            base, _ = load_with_sources(args.config, [*common, *own])
            root = json.dumps(str(base.run.directory / below))
            fixed = (f"run.root={root}", f"run.name={name}", "run.resume=auto")
            words = [*common, *own, *fixed]
            config, sources = load_with_sources(args.config, words)
            found = accepted(check_dry(config, sources, job, gpu_gib=None)[0])
        except ConfigError as error:
            wrong += [(name, problem) for problem in error.problems]
        else:
            checked[name] = _Run(config, words)
            warnings += [(name, problem) for problem in found]
    if wrong:
        raise ConfigError(_by_points(wrong, len(points)))
    if warn:
        print_warnings(_by_points(warnings, len(points)))
    return checked


def _by_points(problems: Sequence[tuple[str, Problem]], count: int) -> list[Problem]:
    """Each problem once, with the points that have it; with none where all `count` have it."""
    named: dict[str, tuple[Problem, list[str]]] = {}
    for name, problem in problems:
        named.setdefault(str(problem), (problem, []))[1].append(name)
    return [
        problem if len(names) == count else replace(problem, message=f"{problem.message} [{', '.join(names)}]")
        for problem, names in named.values()
    ]


def _shares_sft(grid: dict[str, list[str]], runs: _Runs) -> bool:
    """Whether all points would train the same SFT model."""
    if any(run.config.sft is None for run in runs.values()):
        return False
    return not any(key == name or key.startswith(f"{name}.") for key in grid for name in _OF_SFT)


def _train(config: str, words: Sequence[str], ranks: int, grace_s: float) -> int:
    """Run one point to its end, which comes with the end of this process; returns the exit status as a shell gives it.

    What asks this process to stop is passed on, and is the status then, whatever the run's is: torchrun's is 1.
    """
    start = [sys.executable, "-m", "ctpo_megatron.train"]
    if ranks > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *start[1:]]
    end_with_us = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    patient = os.environ | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace_s + _CLOSING_S:.0f}"}  # else 30 s
    asked: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        asked.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        process.send_signal(asked[-1])

    with subprocess.Popen([*start, config, *words], env=patient, preexec_fn=end_with_us) as process:
        before = {number: signal.signal(number, stop) for number in heeded()}
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + asked[0] if asked else status if status >= 0 else 128 - status
