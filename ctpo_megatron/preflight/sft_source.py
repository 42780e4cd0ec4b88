"""The check of `sft.from`: a finished SFT, as this configuration has it, of the model and tokenizer that it trains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from ctpo_megatron.base.run_paths import MARKER, RunPaths, step_in
from ctpo_megatron.config import (
    TOKENIZERS,
    ConfigError,
    Problem,
    SftConfig,
    SftRecord,
    flattened,
    read_sft_record,
    read_spec,
    rendered_by,
    sft_settings,
    stored_tensors,
    will_be_prepared,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.check import RunContext

_KEY = "sft.from"


def check_sft_source(context: RunContext) -> Iterator[Problem]:
    """Another run's SFT that RL can start from, and that this configuration describes."""
    config = context.config
    sft = config.sft
    if sft is None or sft.from_ is None or (config.run.resume and _has_checkpoint(config.run.directory)):
        return
    run = Path(sft.from_)
    if run.resolve() == config.run.directory.resolve():
        yield Problem(_KEY, "is this run's own directory", "choose another run.name, or leave it out", sft.from_)
        return
    try:
        record = read_sft_record(run)
    except ConfigError as error:
        yield from error.problems
        return
    yield from _other_task(context, record, run)
    yield from _other_sft(context, sft, record, run)
    yield from _rendered_otherwise(context, record, run)
    yield from _other_model(context, record, run)


def _has_checkpoint(run: Path) -> bool:
    """Whether a resume takes the weights from a checkpoint of RL."""
    found = RunPaths(run).checkpoints.glob(f"*/{MARKER}")
    return any(step_in(path.parent.name) is not None for path in found)


def _other_sft(context: RunContext, sft: SftConfig, record: SftRecord, run: Path) -> Iterator[Problem]:
    """Keys of `sft`, which have no effect here: they must be what the other run did, as the configuration is kept."""
    ours, theirs = dict(flattened(sft_settings(sft))), dict(flattened(record.sft))
    for key in ours:
        was = theirs.get(key, ())
        if ours[key] != was and not (key == "data" and _same_files(context, record, ours[key], was)):
            message = f"has no effect, and the SFT of {run} (sft.from) was done with {was!r}"
            yield Problem(f"sft.{key}", message, "give that, or no value, which takes that", ours[key])


def _same_files(context: RunContext, record: SftRecord, ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether these are the same files, or of the same names in the task that each run has prepared."""
    prepare = context.config.prepare
    if prepare is None or record.prepare is None:
        return _places(ours) == _places(theirs)
    return _places(ours, prepare.directory) == _places(theirs, record.prepare["directory"])


def _places(files: Sequence[str], task: str | None = None) -> list[str]:
    absolute = [os.path.abspath(file) for file in files]
    root = None if task is None else os.path.abspath(task) + os.sep
    return [path.removeprefix(root) if root else path for path in absolute]


def _other_task(context: RunContext, record: SftRecord, run: Path) -> Iterator[Problem]:
    """Another task than the other run prepared, whose tokenizer would be another."""
    if (prepare := context.config.prepare) is None or record.prepare is None:
        return
    theirs = dict(flattened(record.prepare))
    for key, ours in flattened(prepare.model_dump(mode="json", exclude={"directory"})):
        if ours != (was := theirs.get(key)):
            message = f"prepares another task, with another tokenizer, than {run} (sft.from), which has {was!r}"
            yield Problem(f"prepare.{key}", message, f"set {was!r}", ours)


def _rendered_otherwise(context: RunContext, record: SftRecord, run: Path) -> Iterator[Problem]:
    for key, ours in rendered_by(context.config).items():
        if ours != (was := record.rendered_by.get(key)):
            message = f"differs from what the SFT model of {run} (sft.from) was taught with, {was!r}"
            yield Problem(key, message, "set that, unless RL is to teach the other form", ours, severity="warning")


def _other_model(context: RunContext, record: SftRecord, run: Path) -> Iterator[Problem]:
    """Tensors, settings of config.json or a tokenizer that `model.path` does not have."""
    config, spec = context.config, context.spec
    path, taught = Path(config.model.path), RunPaths(run).sft_model
    if not (path / "config.json").is_file():
        if record.prepare is None and will_be_prepared(config.prepare, path):
            message = f"is prepared by this run, and {run} (sft.from) trained {record.model}"
            yield Problem("model.path", message, f"give model.path={record.model}, prepare=null", config.model.path)
        return
    if spec is not None:
        problems = list(_unlike(spec, taught))
        yield from (replace(problem, key=_KEY, value=str(run)) for problem in problems)
    for name in TOKENIZERS:
        if record.files.get(name) != record.digest_in(path, name):
            message = f"has another {name} than the model that {run} (sft.from) trained, {record.model}"
            yield Problem("model.path", message, f"give that one, or do SFT for {path}", config.model.path)


def _unlike(spec: ModelSpec, taught: Path) -> Iterator[Problem]:
    problems = stored_tensors(taught, spec)[1]
    yield from problems
    if problems:
        return
    try:
        theirs = read_spec(taught, spec.family)
    except ConfigError as error:
        yield from error.problems
        return
    for name in (each.name for each in fields(spec)):
        ours, was = getattr(spec, name), getattr(theirs, name)
        if name not in ("dtype", "family") and ours != was:
            yield Problem(_KEY, f"its model has {name} {was!r}, and model.path {ours!r}", "give a run of that model")
