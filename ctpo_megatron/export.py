"""The verb `ctpo export`: weights of a run or a checkpoint as a Hugging Face directory, and its check."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ctpo_megatron.base.run_paths import MARKER, RunPaths
from ctpo_megatron.config import (
    ConfigError,
    PolicyConfig,
    Problem,
    check_parallel,
    family_for,
    is_replaceable,
    load_config,
    read_spec,
    run_chat_template,
    world_size,
)
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.policy import Layout, Trainer, destroy_distributed, init_distributed, latest_checkpoint
from ctpo_megatron.verify import Finding, check_exported

_OPTIONS = {
    "policy.tensor_model_parallel_size": "--tensor-parallel",
    "policy.pipeline_model_parallel_size": "--pipeline-parallel",
}


@dataclass(frozen=True)
class ExportRequest:
    """What is to be exported, and checked.

    model: Hugging Face directory that gives architecture and tokenizer. checkpoint: None, to check `target` alone.
    target: directory to write, or to check. family: the user's, as the run's configuration names it.
    chat_template: the Jinja text that the run trained with, if it differs from the template of `model`.
    """

    model: Path
    checkpoint: Path | None
    target: Path
    policy: PolicyConfig
    family: ModelFamily | None = None
    chat_template: str | None = None


def resolve(source: Path, model: Path | None, output: Path | None, family: ModelFamily | None = None) -> ExportRequest:
    """Find out what `source` is: a run directory, one of its checkpoints, or a Hugging Face directory.

    A run stands for its newest checkpoint; one without checkpoints, and a Hugging Face directory, for the model that
    is already exported. Raises ConfigError saying what is missing.
    """
    if (source / "config.json").is_file():
        if output is not None:
            raise ConfigError([Problem("--output", f"{source} is in Hugging Face format already", "leave it out")])
        return ExportRequest(source, None, source, _policy(read_spec(source, family).dtype), family)
    is_checkpoint = (source / MARKER).is_file()
    run = source.resolve().parent.parent if is_checkpoint else source
    paths = RunPaths(run)
    if not paths.config.is_file():
        if is_checkpoint:
            return _request_outside_a_run(source, model, output, family)
        fix = "give a run directory, a checkpoint (with COMPLETE.json), or a Hugging Face directory"
        raise ConfigError([Problem("export", "nothing to export here", fix, str(source))])
    config = load_config(paths.config)
    checkpoint = source if is_checkpoint else latest_checkpoint(paths.checkpoints)
    if checkpoint is None:
        exported = run / config.export.directory
        if not (exported / "config.json").is_file():
            fix = "train with checkpoint.every=N, or export.enabled=true"
            raise ConfigError([Problem("export", f"{run} has neither checkpoints nor {exported.name}/", fix)])
        return resolve(exported, model, output, family_for(config.model, config.extensions.path))
    target = output or paths.checkpoint_export(checkpoint)
    model = model or Path(config.model.path)
    request = _request(checkpoint, model, target, family_for(config.model, config.extensions.path), config.policy.dtype)
    try:
        return replace(request, chat_template=run_chat_template(config.model))
    except OSError as error:
        fix = "export from the folder that the run was started in"
        raise ConfigError(
            [Problem("model.chat_template", "not found from here", fix, config.model.chat_template)]
        ) from error


def _request_outside_a_run(
    checkpoint: Path, model: Path | None, output: Path | None, family: ModelFamily | None
) -> ExportRequest:
    if model is not None and output is not None:
        return _request(checkpoint, model, output, family)
    message = f"{checkpoint} is not in a run directory with config.yaml"
    needed = {"--model": (model, "the directory that was trained"), "--output": (output, "the one to write")}
    raise ConfigError(
        [Problem(key, message, f"give {what}: {key} DIR") for key, (given, what) in needed.items() if given is None]
    )


def _request(
    checkpoint: Path, model: Path, target: Path, family: ModelFamily | None, dtype: str | None = None
) -> ExportRequest:
    """dtype: None: as in the model's files."""
    if not (model / "config.json").is_file():
        fix = "export from the folder that the run was started in, or give the directory: --model DIR"
        raise ConfigError([Problem("model.path", "not found from here", fix, str(model))])
    if model.resolve().is_relative_to(target.resolve()):
        message = f"would replace the model that was trained, {model}"
        raise ConfigError([Problem("--output", message, "choose another directory", str(target))])
    if not is_replaceable(target):
        fix = "choose a directory that does not exist, or an exported model, which is replaced"
        raise ConfigError([Problem("--output", "exists and is no exported model", fix, str(target))])
    return ExportRequest(model, checkpoint, target, _policy(dtype or read_spec(model, family).dtype), family)


def _policy(dtype: str) -> PolicyConfig:
    """float16 weights are computed with in float32, which holds all their values."""
    return PolicyConfig(dtype="bfloat16" if dtype == "bfloat16" else "float32", head="logits")


def layout_of(request: ExportRequest, tensor_parallel: int, pipeline_parallel: int) -> PolicyConfig:
    """The policy under a layout. Raises ConfigError naming the options that ranks or model do not fit."""
    spec = read_spec(request.model, request.family)
    policy = request.policy.model_copy(
        update={
            "tensor_model_parallel_size": tensor_parallel,
            "pipeline_model_parallel_size": pipeline_parallel,
            "sequence_parallel": tensor_parallel > 1 and spec.num_experts > 0,  # experts route each rank's own tokens
        }
    )
    problems = list(check_parallel(policy, world_size(), spec, cuda=False))
    if problems:
        raise ConfigError([replace(problem, key=_OPTIONS.get(problem.key, problem.key)) for problem in problems])
    return policy


def export(
    request: ExportRequest, *, check: bool, tolerance: float | None, tensor_parallel: int, pipeline_parallel: int
) -> list[Finding] | None:
    """Write `request.target`, and check it; collective over the ranks that torchrun started. None: not checked.

    Findings are on rank 0. Raises ConfigError when ranks or model do not fit the layout, CheckpointError, OSError.
    """
    config = layout_of(request, tensor_parallel, pipeline_parallel)
    layout: Layout = init_distributed(config, seed=0)
    try:
        policy = Trainer(config, layout, request.model, temperature=1.0, family=request.family)
        if request.checkpoint is not None:
            policy.load_weights(request.checkpoint)
            policy.export(request.target, request.chat_template)
        if not check:
            return None
        return check_exported(request.target, policy, layout, tolerance)
    finally:
        destroy_distributed()
