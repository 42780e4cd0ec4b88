"""The verb `ctpo export`: weights of a run or a checkpoint as a Hugging Face directory, and its check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctpo_megatron.base.exports import checkpoint_steps, exports
from ctpo_megatron.base.run_paths import MARKER, RunPaths, step_name
from ctpo_megatron.base.text import ranges
from ctpo_megatron.config import (
    ConfigError,
    Job,
    ModelConfig,
    PolicyConfig,
    Problem,
    family_for,
    is_replaceable,
    layout_problems,
    load_config,
    read_spec,
    world_size,
)
from ctpo_megatron.environments import TokenizerError, exported_chat_template, read_tokenizer, use_chat_template
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.plan import ELEMENT_BYTES
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
    trained: the run's model, with the chat template and the keywords that it trained with; None: of no known run.
    """

    model: Path
    checkpoint: Path | None
    target: Path
    policy: PolicyConfig
    family: ModelFamily | None = None
    trained: ModelConfig | None = None


def resolve(
    source: Path,
    model: Path | None,
    output: Path | None,
    family: ModelFamily | None = None,
    step: int | None = None,
) -> ExportRequest:
    """Find out what `source` is: a run directory, one of its checkpoints, or a Hugging Face directory.

    A run stands for its checkpoint of `step`, None: the newest. Where an export is of a later step than the newest
    checkpoint, or there is none, it stands for that export, as a Hugging Face directory does for itself. Raises
    ConfigError saying what is missing.
    """
    if step is not None and ((source / "config.json").is_file() or (source / MARKER).is_file()):
        raise ConfigError([Problem("--step", f"{source} is no run directory", "leave it out", step)])
    if (source / "config.json").is_file():
        if output is not None:
            raise ConfigError([Problem("--output", f"{source} is in Hugging Face format already", "leave it out")])
        file = RunPaths(source.resolve().parent).config
        trained = load_config(file).model if file.is_file() else None  # it is the `model` of a run
        return ExportRequest(source, None, source, _policy(read_spec(source, family).dtype), family, trained)
    is_checkpoint = (source / MARKER).is_file()
    run = source.resolve().parent.parent if is_checkpoint else source
    paths = RunPaths(run)
    if not paths.config.is_file():
        if is_checkpoint:
            return _request_outside_a_run(source, model, output, family)
        fix = "give a run directory, a checkpoint (with COMPLETE.json), or a Hugging Face directory"
        raise ConfigError([Problem("export", "nothing to export here", fix, str(source))])
    config = load_config(paths.config)
    checkpoint = source if is_checkpoint else _checkpoint(paths, step)
    if not is_checkpoint and step is None:
        saved = max(checkpoint_steps(run), default=-1)
        exported = max(exports(run, config.export.directory), key=lambda export: export.step, default=None)
        if exported is not None and (checkpoint is None or exported.step > saved):
            return resolve(exported.path, model, output, family_for(config.model, config.extensions.path))
    if checkpoint is None:
        missing = f"{run} has neither checkpoints nor {config.export.directory}/"
        raise ConfigError([Problem("export", missing, "train a step first: the last one is saved")])
    target = output or paths.checkpoint_export(checkpoint)
    model = model or Path(config.model.path)
    trained = config.model.model_copy(update={"path": str(model)})
    request = _request(checkpoint, model, target, family_for(config.model, config.extensions.path), config.policy.dtype)
    try:
        exported_chat_template(trained)
    except OSError as error:
        fix = "export from the folder that the run was started in"
        raise ConfigError(
            [Problem("model.chat_template", "not found from here", fix, config.model.chat_template)]
        ) from error
    except TokenizerError as error:
        raise ConfigError([Problem("model.path", str(error), value=str(model))]) from error
    return replace(request, trained=trained)


def _checkpoint(paths: RunPaths, step: int | None) -> Path | None:
    """Of a step, None: the newest; None: there is none. Raises ConfigError where a step that is given has none."""
    if step is None:
        return latest_checkpoint(paths.checkpoints)
    if step not in (there := checkpoint_steps(paths.root)):
        fix = f"choose of the steps {ranges(there)}" if there else "train a step first: the last one is saved"
        raise ConfigError([Problem("--step", f"{paths.root} has no checkpoint of this step", fix, step)])
    return paths.checkpoints / step_name(step)


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
    """dtype: a precision that the trainer has not is computed with in float32."""
    ours = dtype if dtype in ELEMENT_BYTES else "float32"
    return PolicyConfig.model_validate({"dtype": ours})


def layout_of(request: ExportRequest, tensor_parallel: int, pipeline_parallel: int) -> PolicyConfig:
    """Return the policy under a layout. Raises ConfigError naming the options that ranks or model do not fit."""
    spec = read_spec(request.model, request.family)
    policy = request.policy.model_copy(
        update={
            "tensor_model_parallel_size": tensor_parallel,
            "pipeline_model_parallel_size": pipeline_parallel,
            "sequence_parallel": tensor_parallel > 1 and spec.num_experts > 0,  # experts route each rank's own tokens
        }
    )
    problems = list(layout_problems(policy, spec, Job(world_size())))
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
            state = policy.load_weights(request.checkpoint)
            step = state["step"] if "rollouts" in state else None  # one of SFT counts other steps
            policy.export(request.target, exported_chat_template(request.trained) if request.trained else None, step)
        if not check:
            return None
        findings = check_exported(request.target, policy, layout, tolerance)
        if request.trained is not None and layout.is_rank_zero:
            findings.append(_check_prompt(request.target, request.trained))
        return findings
    finally:
        destroy_distributed()


_CONVERSATIONS = (
    [("system", "Be brief."), ("user", "What is 2 + 3?")],
    [("user", "What is 2 + 3?"), ("assistant", "5"), ("user", "And 4 + 5?")],
)


def _check_prompt(directory: Path, trained: ModelConfig) -> Finding:
    """Whether what a server makes of a conversation is what the model was trained on."""
    try:
        ours, theirs = read_tokenizer(trained.path), read_tokenizer(directory)
        use_chat_template(ours, trained)
    except (OSError, TokenizerError) as error:
        return Finding("prompt", False, f"cannot be compared with the run's: {error}")
    for conversation in _CONVERSATIONS:
        messages = [{"role": role, "content": text} for role, text in conversation]
        expected = str(_rendered(ours, messages, trained.chat_template_kwargs))
        if (found := str(_rendered(theirs, messages, {}))) != expected:
            fix = "export it again, or send the keywords of model.chat_template_kwargs with each request"
            return Finding("prompt", False, f"a server asks {found[-60:]!r}, the run asked {expected[-60:]!r}; {fix}")
    return Finding("prompt", True, "as in training, without keywords of the chat template")


def _rendered(tokenizer: Any, messages: list[dict[str, str]], keywords: Mapping[str, Any]) -> Any:
    """The text; or why the template refuses the conversation, as one may refuse a system prompt."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **keywords)
    except Exception as error:  # a template may raise anything
        return error
