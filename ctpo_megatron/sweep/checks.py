"""Checks of all configurations of a sweep, before the first run starts."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ctpo_megatron.base.run_paths import RunPaths, SweepPaths
from ctpo_megatron.config import ConfigError, Job, Problem, spec_for
from ctpo_megatron.preflight import (
    RunContext,
    check_data,
    check_disk,
    check_extensions,
    failed,
    place,
    validate,
    warnings_of,
)
from ctpo_megatron.sweep.plan import Mistakes, Sweep
from ctpo_megatron.sweep.record import differing


def check(sweep: Sweep, job: Job, *, cuda: bool) -> list[Problem]:
    """The warnings of all configurations, each once. Raises ConfigError with all errors, and what is in the way."""
    mistakes, warnings = Mistakes(len(sweep.runs)), Mistakes(len(sweep.runs))
    mistakes.add("", list(_in_the_way(sweep)))
    for run in sweep.all:
        source = None if run.sft is None else sweep.sfts[run.sft].directory
        mistakes.add(run.name, list(differing(run, source, alone=run.name in sweep.sfts)))
        try:
            found = validate(run.config, job, cuda=cuda, sources=run.sources)
            found += warnings_of(check_disk(RunContext(run.config, spec_for(run.config))), run.sources)
            check_extensions(run.config, run.sources)
            warnings.add(run.name, found)
        except ConfigError as error:
            mistakes.add(run.name, error.problems)
    mistakes.raise_any()
    return warnings.problems()


def check_rows(sweep: Sweep, rows: int | None) -> list[Problem]:
    """The warnings of the data, which is read once for all runs that read and render it alike.

    rows: of each file; None: all. Raises ConfigError with all errors.
    """
    mistakes, warnings, seen = Mistakes(len(sweep.runs)), Mistakes(len(sweep.runs)), set[str]()
    for run in sweep.runs:
        tree = run.config.model_dump(mode="json")
        reads = json.dumps([tree[part] for part in ("model", "data", "prepare", "sft", "rollout", "reward")])
        if reads in seen:
            continue
        seen.add(reads)
        placed = [place(problem, run.sources) for problem in check_data(run.config, rows).problems]
        mistakes.add(run.name, failed(placed))
        warnings.add(run.name, [problem for problem in placed if not problem.failed])
    mistakes.raise_any()
    return warnings.problems()


def _in_the_way(sweep: Sweep) -> Iterator[Problem]:
    """A folder of the sweep's name that is something else."""
    directory, paths = sweep.directory, SweepPaths(sweep.directory)
    if RunPaths(directory).config.exists():
        message = f"{directory} is a run, and a sweep of that name would write into it"
    elif directory.exists() and not paths.record.exists() and _holds_others(sweep):
        message = f"{directory} exists, and is no sweep (no {paths.record.name} in it)"
    else:
        return
    yield Problem("run.name", message, "choose another run.name, or move it away", directory.name)


def _holds_others(sweep: Sweep) -> bool:
    """Whether anything is in the folder that a sweep which was killed at its start cannot have left."""
    known = {run.directory.name for run in sweep.all} | {SweepPaths(sweep.directory).owner.name}
    return any(entry.name not in known for entry in sweep.directory.iterdir())
