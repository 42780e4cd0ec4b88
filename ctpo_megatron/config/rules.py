"""Rules between keys, the model and the job: what would fail, or be wrong, later. They need no machine.

A rule is a function of a configuration, the model's spec and the job, which yields its findings in display order. It
never raises. Without a spec, since the model cannot be read, what depends on it is not looked at.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError, read_mapping
from ctpo_megatron.base.installed import is_installed
from ctpo_megatron.base.run_paths import MARKER, RunPaths, is_discarded, step_in
from ctpo_megatron.base.text import conceals
from ctpo_megatron.config import policy_rules, rollout_rules
from ctpo_megatron.config.hub import HubName
from ctpo_megatron.config.keys import flattened
from ctpo_megatron.config.model_directory import (
    check_tied,
    is_replaceable,
    stored_tensors,
    task_command,
    tokenizer_problems,
)
from ctpo_megatron.config.placement import Job, evaluates
from ctpo_megatron.config.problems import ConfigError, Problem, error, value_of, warning
from ctpo_megatron.config.rollout_schema import COLDEST
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.section import LONGEST_S
from ctpo_megatron.models import ModelSpec

ConfigRule = Callable[[Config, ModelSpec | None, Job], Iterable[Problem]]


def check_training(config: Config, model: ModelSpec | None, job: Job, *, files: bool = True) -> list[Problem]:
    """Findings of the rules of training, errors first. files: model and prompt files are there."""
    rules = [rule for rule in TRAINING if files or rule not in FILES]
    # In the order of the alphabet: error, missing, warning.
    return sorted(_findings(rules, config, model, job), key=lambda problem: problem.severity)


def check_sampling(config: Config, model: ModelSpec | None, job: Job) -> list[Problem]:
    """Findings of what an evaluation without a trainer needs."""
    engine = ENGINE if model is not None else ()
    return _findings([*engine, *SAMPLING], config, model, job)


def _findings(rules: Iterable[ConfigRule], config: Config, model: ModelSpec | None, job: Job) -> list[Problem]:
    return [problem for rule in rules for problem in rule(config, model, job)]


def check_concealed(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Values that a run's config.yaml does not tell; there they are known by `redact.conceals`."""
    for key, value in flattened(config.model_dump(mode="json")):
        if conceals(value):
            message = "was a secret, which config.yaml of a run does not contain"
            yield Problem(key, message, f"give it again: {key}=...", value)


def check_run(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    if config.run.resume and config.run.overwrite:
        yield error(config, "run.resume", "contradicts run.overwrite: true", "switch one of them off")
    if (deadline := config.run.deadline) is not None and not 0 < deadline - time.time() < LONGEST_S:
        message = "is in the past" if deadline <= time.time() else "is decades ahead"
        yield error(config, "run.deadline", message, "give seconds since the epoch, such as $(date -d +4hours +%s)")

    if never := [str(step) for step in config.run.profile_steps if step > config.run.steps]:
        message = f"names steps that are never made: {', '.join(never)} of {config.run.steps} (run.steps)"
        yield warning(config, "run.profile_steps", message, "remove them: no trace is written")


def check_evaluation(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    evaluation = config.eval
    if not config.data.eval:
        if evaluation.every:
            yield error(config, "eval.every", "there is nothing to evaluate on", "give data.eval, or set it to 0")
        elif evaluation.prompts is not None:
            yield warning(config, "eval.prompts", "has no effect without data.eval", "give data.eval, or remove it")
    if 0 < evaluation.temperature < COLDEST:
        fix = f"set 0 for greedy decoding, or at least {COLDEST:g}"
        yield error(config, "eval.temperature", f"the engine would sample at {COLDEST:g} instead", fix)
    if evaluation.temperature == 0 and evaluation.samples > 1:
        fix = "set eval.temperature above 0, or samples to 1"
        yield warning(config, "eval.samples", "greedy decoding gives the same answer every time", fix)


# What decides which prompts a step draws, and how many trajectories it has.
_DRAW = ("run.seed", "data.shuffle", "rollout.prompts_per_step", "rollout.samples_per_prompt")


def check_model_directory(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Weights that are whole and fit config.json, and a tokenizer; nothing of a model still to be prepared."""
    directory = Path(config.model.path)
    if (directory / "config.json").is_file():
        stored, problems = stored_tensors(directory, model)
        if model is not None and not problems:
            try:
                check_tied(directory, stored, model)
            except ConfigError as untied:
                problems = [*untied.problems]
        yield from problems
        yield from tokenizer_problems(directory)


def check_export(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Refuse an export that would replace anything but an earlier export, or something that is needed."""
    key, name = "export.directory", config.export.directory
    if not config.export.enabled:
        return
    if name in (".", "..", *RunPaths.names()):
        what = "is not a name" if name in (".", "..") else "is what the run writes something else to"
        yield error(config, key, what, "choose another, e.g. model")
        return
    target = (config.run.directory / name).resolve()
    needed = [f"{name} ({path})" for name, path in config.inputs() if path.resolve().is_relative_to(target)]
    if needed:
        message = f"in {config.run.directory} would be replaced, but holds {', '.join(needed)}"
        yield error(config, key, message, "choose another name")
    elif not config.run.overwrite and not is_replaceable(target):
        message = f"exists in {config.run.directory}, and is no model directory: it will not be replaced"
        yield error(config, key, message, "choose another name, or move it away")


def check_prompt_files(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Data files that are not there. Names of the Hub are looked up as the data are read."""
    wanted: list[tuple[str, Iterable[str]]] = [("data.train", config.data.train_files), ("data.eval", config.data.eval)]
    if config.sft:
        wanted.append(("sft.data", config.sft.data))
    for key, files in wanted:
        for file in files:
            path = Path(file)
            if not path.exists() and not glob.has_magic(file) and HubName.of(file) is None:
                yield Problem(key, "no such file", _file_hint(path), file)


def _file_hint(file: Path) -> str:
    if command := task_command(file):
        return f"{command} writes it"
    return "give the path of a data file, or of a folder of them (docs/data.md)"


def check_checkpoints(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Require a checkpoint to load that exists, and for the best ones a metric that will."""
    settings = config.checkpoint
    if config.run.resume and not settings.every and config.run.steps:
        message = "but checkpoint.every is 0: there is no checkpoint before the last step, and a crash loses all steps"
        yield warning(config, "run.resume", message, "checkpoint.every: auto")
    if settings.load is not None:
        path = Path(settings.load)
        if not (path / MARKER).is_file():
            fix = "give a folder such as runs/first/checkpoints/step_000010"
            yield error(config, "checkpoint.load", f"is no complete checkpoint (no {MARKER} in it)", fix)
        of_this_run = path.resolve().is_relative_to(config.run.directory.resolve())
        if of_this_run and not config.run.resume:
            message = "is a checkpoint of this very run, which would start again"
            yield error(config, "checkpoint.load", message, "add run.resume=true, or choose another run.name")
        elif of_this_run and is_discarded(path):
            message = "was discarded by this run, which continued from another checkpoint"
            yield error(config, "checkpoint.load", message, "choose another run.name, without run.resume=true")
        elif config.run.resume is True or (of_this_run and config.run.resume):
            yield from _given_up(config, path)
    if settings.keep_best and settings.best_metric.startswith("val/"):
        if not evaluates(config):
            message = "is never computed: nothing is evaluated"
            fix = "set eval.every" if config.data.eval else "give data.eval"
            yield error(config, "checkpoint.best_metric", message, f"{fix}, or use reward/mean")
        elif not _evaluated(settings.every, config.eval.every):
            message = f"is unknown between evaluations (eval.every: {config.eval.every}): checkpoints there never count"
            fix = "set checkpoint.every to a multiple of eval.every"
            yield warning(config, "checkpoint.best_metric", message, fix)


def _evaluated(saves: int | str, evaluations: int) -> bool:
    """Whether every checkpoint comes after an evaluation. saves: `checkpoint.every`; evaluations: `eval.every`."""
    if isinstance(saves, str):  # auto: after any step
        return evaluations == 1
    return not saves or (evaluations > 0 and saves % evaluations == 0)


def _given_up(config: Config, load: Path) -> Iterator[Problem]:
    found = [path.parent for path in RunPaths(config.run.directory).checkpoints.glob(f"*/{MARKER}")]
    newest = max(found, key=_step, default=load)
    if _step(newest) > _step(load) >= 0:
        message = f"discards what this run did after it, up to {newest.name}, now and at every restart that has it"
        yield warning(config, "checkpoint.load", message, "leave it out to continue from the newest")


def _step(checkpoint: Path) -> int:
    """The step in the name of a checkpoint; -1: the name has none, or it was discarded."""
    step = step_in(checkpoint.name)
    return -1 if step is None else step


def check_replay(config: Config, model: ModelSpec | None, job: Job) -> Iterator[Problem]:
    """Require a recording that has every step, drawn as this run draws."""
    if config.rollout.replay is None:
        return
    recording = Path(config.rollout.replay)
    paths = RunPaths(recording)
    if recording.resolve() == config.run.directory.resolve():
        yield error(config, "rollout.replay", "is this run's own directory", "choose another run.name")
    if not paths.config.is_file():
        message = f"is no run directory (no {paths.config.name} in it)"
        yield error(config, "rollout.replay", message, "give one, e.g. runs/first")
        return
    steps = {step_in(path.stem) for path in paths.trajectories.glob("*.[jp]*")}
    missing = [paths.dump(step, "parquet").name for step in range(1, config.run.steps + 1) if step not in steps]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        message = f"lacks {len(missing)} of {config.run.steps} steps: {paths.trajectories.name}/{{{shown}}}"
        yield error(config, "rollout.replay", message, "lower run.steps, or record with tracking.trajectories: all")
    try:
        recorded = read_mapping(paths.config)
    except DamagedFileError as problem:
        yield error(config, "rollout.replay", str(problem), "give another recording")
        return
    if _at(recorded, "tracking.trajectories") == "sample":
        message = "has a sample of its trajectories only (tracking.trajectories)"
        yield error(config, "rollout.replay", message, "record with tracking.trajectories: all")
    for key in _DRAW:
        found = _at(recorded, key)
        if found is not None and found != value_of(config, key):
            fix = f"set it to {found!r}, or record again"
            yield error(config, key, f"but rollout.replay was recorded with {found!r}: other prompts are drawn", fix)
    yield from _refilled(config, recorded)
    if config.data.eval and not evaluates(config):
        message = "has no answers of these weights, and eval.every: 0 starts no engine for them: nothing is evaluated"
        yield warning(config, "rollout.replay", message, "set eval.every to evaluate in the run")
    if evaluates(config) and (missing := [name for name in ("ray", "vllm") if not is_installed(name)]):
        message = f"evaluates on engines, also next to rollout.replay, and lacks {' and '.join(missing)}"
        yield error(config, "eval.every", message, "set eval.every=0, which needs no engine, or install them")


def _refilled(config: Config, recorded: Any) -> Iterator[Problem]:
    """Where there are refills, how often decides which prompts are drawn; `keep` and `drop` draw the same."""
    refills = (_at(recorded, "rollout.uniform_groups") == "refill", config.rollout.uniform_groups == "refill")
    if any(refills) and not all(refills):
        was = _at(recorded, "rollout.uniform_groups") or "keep"
        message = f"but rollout.replay was recorded with {was!r}: other prompts are drawn"
        yield error(config, "rollout.uniform_groups", message, f"set it to {was!r}, or record again")
    elif all(refills) and (most := _at(recorded, "rollout.max_refills")) != config.rollout.max_refills:
        message = f"but rollout.replay was recorded with {most}: other prompts are drawn"
        yield error(config, "rollout.max_refills", message, f"set it to {most}, or record again")


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


FILES: tuple[ConfigRule, ...] = (check_prompt_files, check_model_directory)
TRAINING: tuple[ConfigRule, ...] = (
    check_concealed,
    check_run,
    policy_rules.check_layout,
    policy_rules.check_attention,
    policy_rules.check_batch,
    rollout_rules.check_tokens,
    rollout_rules.check_engine,
    rollout_rules.check_endpoint,
    policy_rules.check_router_replay,
    rollout_rules.check_placement,
    rollout_rules.check_cluster,
    rollout_rules.check_protocol,
    policy_rules.check_objective,
    policy_rules.check_groups,
    rollout_rules.check_staleness,
    policy_rules.check_schedules,
    check_evaluation,
    rollout_rules.check_deadlines,
    *FILES,
    rollout_rules.check_programs,
    check_export,
    check_checkpoints,
    check_replay,
)
ENGINE: tuple[ConfigRule, ...] = (rollout_rules.check_budget, rollout_rules.check_engine_starts, check_model_directory)
SAMPLING: tuple[ConfigRule, ...] = (
    check_concealed,
    rollout_rules.check_cluster,
    rollout_rules.check_protocol,
    rollout_rules.check_endpoint,
    check_evaluation,
    rollout_rules.check_deadlines,
    rollout_rules.check_programs,
)
