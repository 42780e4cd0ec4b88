"""Checks of the files and directories that a run reads, continues from or repeats, and of the export that it writes."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError, read_mapping
from ctpo_megatron.base.installed import is_installed
from ctpo_megatron.base.run_paths import MARKER, RunPaths, is_discarded, step_in
from ctpo_megatron.config import (
    ConfigError,
    Problem,
    check_tied,
    evaluates,
    is_replaceable,
    stored_tensors,
    task_command,
    tokenizer_problems,
)
from ctpo_megatron.preflight.check import RunContext

# What decides which prompts a step draws, and how many trajectories it has.
_DRAW = ("run.seed", "data.shuffle", "rollout.prompts_per_step", "rollout.samples_per_prompt")


def check_model_directory(context: RunContext) -> Iterator[Problem]:
    """Weights that are whole and fit config.json, and a tokenizer; nothing of a model still to be prepared."""
    directory = Path(context.config.model.path)
    if (directory / "config.json").is_file():
        stored, problems = stored_tensors(directory, context.spec)
        if context.spec is not None and not problems:
            try:
                check_tied(directory, stored, context.spec)
            except ConfigError as error:
                problems = [*error.problems]
        yield from problems
        yield from tokenizer_problems(directory)


def check_export(context: RunContext) -> Iterator[Problem]:
    """The export replaces a directory of its name: it must not be anything else that is there, or is needed."""
    config = context.config
    key, name = "export.directory", config.export.directory
    if not config.export.enabled:
        return
    if name in (".", "..", *RunPaths.names()):
        what = "is not a name" if name in (".", "..") else "is what the run writes something else to"
        yield context.error(key, what, "choose another, e.g. model")
        return
    target = (config.run.directory / name).resolve()
    needed = [f"{name} ({path})" for name, path in config.inputs() if path.resolve().is_relative_to(target)]
    if needed:
        message = f"in {config.run.directory} would be replaced, but holds {', '.join(needed)}"
        yield context.error(key, message, "choose another name")
    elif not config.run.overwrite and not is_replaceable(target):
        message = f"exists in {config.run.directory}, and is no model directory: it will not be replaced"
        yield context.error(key, message, "choose another name, or move it away")


def check_prompt_files(context: RunContext) -> Iterator[Problem]:
    """Data files that are not there."""
    config = context.config
    wanted: list[tuple[str, Iterable[str]]] = [("data.train", config.data.train_files), ("data.eval", config.data.eval)]
    if config.sft:
        wanted.append(("sft.data", config.sft.data))
    for key, files in wanted:
        for file in files:
            path = Path(file)
            if not path.exists() and not glob.has_magic(file):
                yield Problem(key, "no such file", _file_hint(path), file)


def _file_hint(file: Path) -> str:
    if command := task_command(file):
        return f"{command} writes it"
    if str(file).count("/") == 1 and not file.parent.exists():
        return f"a data set of the Hub first: hf download {file} --repo-type dataset --local-dir DIRECTORY"
    return "give the path of a data file, or of a folder of them (docs/data.md)"


def check_checkpoints(context: RunContext) -> Iterator[Problem]:
    """A checkpoint to load that is there; a metric for the best ones that will be."""
    config = context.config
    settings = config.checkpoint
    if config.run.resume and not settings.every and config.run.steps:
        message = "but checkpoint.every is 0: there is no checkpoint before the last step, and a crash loses all steps"
        yield context.warning("run.resume", message, "checkpoint.every: auto")
    if settings.load is not None:
        path = Path(settings.load)
        if not (path / MARKER).is_file():
            fix = "give a folder such as runs/first/checkpoints/step_000010"
            yield context.error("checkpoint.load", f"is no complete checkpoint (no {MARKER} in it)", fix)
        of_this_run = path.resolve().is_relative_to(config.run.directory.resolve())
        if of_this_run and not config.run.resume:
            message = "is a checkpoint of this very run, which would start again"
            yield context.error("checkpoint.load", message, "add run.resume=true, or choose another run.name")
        elif of_this_run and is_discarded(path):
            message = "was discarded by this run, which continued from another checkpoint"
            yield context.error("checkpoint.load", message, "choose another run.name, without run.resume=true")
        elif config.run.resume is True or (of_this_run and config.run.resume):
            yield from _given_up(context, path)
    if settings.keep_best and settings.best_metric.startswith("val/"):
        if not evaluates(config):
            message = "is never computed: nothing is evaluated"
            fix = "set eval.every" if config.data.eval else "give data.eval"
            yield context.error("checkpoint.best_metric", message, f"{fix}, or use reward/mean")
        elif not _evaluated(settings.every, config.eval.every):
            message = f"is unknown between evaluations (eval.every: {config.eval.every}): checkpoints there never count"
            fix = "set checkpoint.every to a multiple of eval.every"
            yield context.warning("checkpoint.best_metric", message, fix)


def _evaluated(saves: int | str, evaluations: int) -> bool:
    """Whether every checkpoint comes after an evaluation. saves: `checkpoint.every`; evaluations: `eval.every`."""
    if isinstance(saves, str):  # auto: after any step
        return evaluations == 1
    return not saves or (evaluations > 0 and saves % evaluations == 0)


def _given_up(context: RunContext, load: Path) -> Iterator[Problem]:
    config = context.config
    found = [path.parent for path in RunPaths(config.run.directory).checkpoints.glob(f"*/{MARKER}")]
    newest = max(found, key=_step, default=load)
    if _step(newest) > _step(load) >= 0:
        message = f"discards what this run did after it, up to {newest.name}, now and at every restart that has it"
        yield context.warning("checkpoint.load", message, "leave it out to continue from the newest")


def _step(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1: the name has none, or it was discarded."""
    step = step_in(checkpoint.name)
    return -1 if step is None else step


def check_replay(context: RunContext) -> Iterator[Problem]:
    """A recording that has every step, drawn as this run draws."""
    config = context.config
    if config.rollout.replay is None:
        return
    recording = Path(config.rollout.replay)
    paths = RunPaths(recording)
    if recording.resolve() == config.run.directory.resolve():
        yield context.error("rollout.replay", "is this run's own directory", "choose another run.name")
    if not paths.config.is_file():
        message = f"is no run directory (no {paths.config.name} in it)"
        yield context.error("rollout.replay", message, "give one, e.g. runs/first")
        return
    steps = {step_in(path.stem) for path in paths.trajectories.glob("*.[jp]*")}
    missing = [paths.dump(step, "parquet").name for step in range(1, config.run.steps + 1) if step not in steps]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        message = f"lacks {len(missing)} of {config.run.steps} steps: {paths.trajectories.name}/{{{shown}}}"
        yield context.error("rollout.replay", message, "lower run.steps, or record with tracking.trajectories: all")
    try:
        recorded = read_mapping(paths.config)
    except DamagedFileError as problem:
        yield context.error("rollout.replay", str(problem), "give another recording")
        return
    if _at(recorded, "tracking.trajectories") == "sample":
        message = "has a sample of its trajectories only (tracking.trajectories)"
        yield context.error("rollout.replay", message, "record with tracking.trajectories: all")
    for key in _DRAW:
        found = _at(recorded, key)
        if found is not None and found != context.value(key):
            fix = f"set it to {found!r}, or record again"
            yield context.error(key, f"but rollout.replay was recorded with {found!r}: other prompts are drawn", fix)
    yield from _refilled(context, recorded)
    if config.data.eval and not evaluates(config):
        message = "has no answers of these weights, and eval.every: 0 starts no engine for them: nothing is evaluated"
        yield context.warning("rollout.replay", message, "set eval.every to evaluate in the run")
    if evaluates(config) and (missing := [name for name in ("ray", "vllm") if not is_installed(name)]):
        message = f"evaluates on engines, also next to rollout.replay, and lacks {' and '.join(missing)}"
        yield context.error("eval.every", message, "set eval.every=0, which needs no engine, or install them")


def _refilled(context: RunContext, recorded: Any) -> Iterator[Problem]:
    """Where there are refills, how often decides which prompts are drawn; `keep` and `drop` draw the same."""
    config = context.config
    refills = (_at(recorded, "rollout.uniform_groups") == "refill", config.rollout.uniform_groups == "refill")
    if any(refills) and not all(refills):
        was = _at(recorded, "rollout.uniform_groups") or "keep"
        message = f"but rollout.replay was recorded with {was!r}: other prompts are drawn"
        yield context.error("rollout.uniform_groups", message, f"set it to {was!r}, or record again")
    elif all(refills) and (most := _at(recorded, "rollout.max_refills")) != config.rollout.max_refills:
        message = f"but rollout.replay was recorded with {most}: other prompts are drawn"
        yield context.error("rollout.max_refills", message, f"set it to {most}, or record again")


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
