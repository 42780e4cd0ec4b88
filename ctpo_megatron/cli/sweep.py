"""`ctpo sweep`: every point of a grid, one `ctpo train` after the other; the same line continues it."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType

from ctpo_megatron.base.signals import heeded
from ctpo_megatron.cli.compare import show_comparison
from ctpo_megatron.cli.console import print_warnings
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import Config, ConfigError, Job, Problem, load_with_sources, short_names, world_size
from ctpo_megatron.preflight import Findings, check_dry, has_cuda_device
from ctpo_sandbox.arguments import positive
from ctpo_sandbox.libc import die_with_parent

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)
_CLOSING_S = 120.0
"""For a run to close its engines and its sandbox, after `checkpoint.grace_s`."""
_FIXED = ("run.name", "run.root", "run.resume", "run.overwrite", "run.deadline")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
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
    parser.add_argument("--dry-run", action="store_true", help="check all configurations, print the runs, start none")


def run(args: argparse.Namespace) -> int:
    """Check all points, then train each; returns 1 if a run failed, and the status of a run that was stopped."""
    if world_size() > 1 or "RANK" in os.environ:
        raise UsageError("starts the ranks of each run itself: start it without torchrun, with --ranks N")
    grid, common = read_grid(args.grid, [*args.overrides, *args.unknown])
    points = _checked(args, common, points_of(grid))
    configs = {name: config for name, (config, _) in points.items()}
    folder = next(iter(configs.values())).run.directory.parent
    print(f"{len(points)} runs in {folder}: {', '.join(points)}", flush=True)
    if _shares_sft(grid, configs):
        line = shlex.join(["ctpo", "train", args.config, *common, "run.name=sft", "run.steps=0"])
        print(f"SFT is the same in all of them. To do it once: {line}")
        print("and give the sweep: model.path=RUN/sft_model sft=null")
    if args.dry_run:
        return 0
    statuses = {}
    for name, (config, words) in points.items():
        print(f"[sweep] {name}", flush=True)
        statuses[name] = _train(args.config, words, args.ranks, config.checkpoint.grace_s)
        if statuses[name] in STOPPED:
            print(f"stopped in {config.run.directory}; the same command continues", file=sys.stderr)
            return statuses[name]
    failed = {name: status for name, status in statuses.items() if status}
    finished = [config.run.directory for name, config in configs.items() if name not in failed]
    if len(finished) > 1:
        show_comparison(finished, folder / "comparison.html")
    for name, status in failed.items():
        print(f"{name} failed with exit status {status}; the same command tries it again", file=sys.stderr)
    return int(bool(failed))


def read_grid(items: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return key -> values of the grid, and the overrides of all runs: a key with one value is one, too.

    Raises ConfigError with every mistake.
    """
    grid: dict[str, list[str]] = {}
    common, problems = list(overrides), list[Problem]()
    for item in items:
        key, _, text = item.partition("=")
        values = [value.strip() for value in _split(text)]
        if len(values) == 1:
            common.append(item)
        elif key in grid:
            problems.append(Problem(key, "is there twice", "give all its values at once", text, "--grid"))
        else:
            grid[key] = values
    given = {text.partition("=")[0] for text in common}
    for key, values in grid.items():
        if key in _FIXED:
            problems.append(Problem(key, "cannot vary: the sweep decides it", "leave it out", where="--grid"))
        if key in given:
            problems.append(Problem(key, "is an override, too: which counts?", "give it once", where="--grid"))
        if len(set(values)) < len(values) or "" in values:
            text = ",".join(values)
            problems.append(Problem(key, "has an empty value, or one twice", "give every value once", text, "--grid"))
    if not grid:
        fix = "give a key several, e.g. --grid run.seed=0,1,2; one run is `ctpo train`"
        problems.append(Problem("", "no key has more than one value", fix, where="--grid"))
    if problems:
        raise ConfigError(problems)
    return grid, common


def points_of(grid: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the name of each point and its overrides; the last key varies fastest.

    A name follows from the values alone, such as `ctpo-seed0`, so that a grid can grow.
    """
    labels = short_names(grid, among=grid)
    points = {}
    for values in itertools.product(*grid.values()):
        name = "-".join(_part(key, labels[key], value) for key, value in zip(grid, values, strict=True))
        points[name] = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
    return points


def _split(text: str) -> Iterator[str]:
    """Text between commas that are in no quotes or brackets."""
    part, depth, quote = "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            depth += (character in "[{(") - (character in ")}]")
        if character == "," and not quote and depth <= 0:
            yield part
            part = ""
        else:
            part += character
    yield part


def _part(key: str, label: str, value: str) -> str:
    """A value in a name; a digest tells values apart that a name cannot hold."""
    text = value if key == "objective.preset" else f"{label}{'' if _NUMBER.fullmatch(value) else '_'}{value}"
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:40]
    if plain == text:
        return text
    return f"{plain.strip('_')}.{hashlib.blake2b(text.encode(), digest_size=3).hexdigest()}"


def _checked(
    args: argparse.Namespace, common: Sequence[str], points: Mapping[str, Sequence[str]]
) -> dict[str, tuple[Config, list[str]]]:
    """The configuration and all overrides of each point, once a dry run finds nothing wrong with any.

    Raises ConfigError with what is wrong with all of them.
    """
    checked, job = {}, Job(args.ranks, args.ranks if args.ranks > 1 else None)
    wrong, doubtful = list[tuple[str, Problem]](), list[tuple[str, Problem]]()
    for name, own in points.items():
        try:
            base, _ = load_with_sources(args.config, [*common, *own])
            fixed = (f"run.root={json.dumps(str(base.run.directory))}", f"run.name={name}", "run.resume=auto")
            words = [*common, *own, *fixed]
            config, sources = load_with_sources(args.config, words)
            findings: Findings = check_dry(config, sources, job, cuda=has_cuda_device(), gpu_gib=None)[0]
            findings.raise_if_any()
        except ConfigError as error:
            wrong += [(name, problem) for problem in error.problems]
        else:
            checked[name] = config, words
            doubtful += [(name, problem) for problem in findings.warnings]
    if wrong:
        raise ConfigError(_by_points(wrong, len(points)))
    print_warnings(_by_points(doubtful, len(points)))
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


def _shares_sft(grid: dict[str, list[str]], configs: dict[str, Config]) -> bool:
    """Whether all points would train the same SFT model."""
    if any(config.sft is None for config in configs.values()):
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
