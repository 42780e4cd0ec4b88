"""Checks of the Hugging Face directories that a run reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ctpo_megatron.config.problems import Problem, error
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.weight_files import stored_tensors, tokenizer_problems
from ctpo_megatron.models import ModelSpec

_RUN_DIRECTORY = {
    "config.yaml",
    "config.previous.yaml",
    "data.json",
    "environment.json",
    "extensions",
    "extensions.json",
    "extensions.previous",
    "heartbeat.json",
    "metrics.jsonl",
    "owner.lock",
    "sft.jsonl",
    "stages.json",
    "stalls",
    "report.html",
    "trajectories",
    "evaluation",
    "checkpoints",
    "tensorboard",
    "trackers",
    "wandb",
    "logs",
    "figures",
}
"""What a run writes into its directory besides the export."""


def check_model_directory(config: Config, spec: ModelSpec | None) -> Iterator[Problem]:
    """Weights that are whole and fit config.json, and a tokenizer; nothing of a model still to be prepared."""
    directory = Path(config.model.path)
    if (directory / "config.json").is_file():
        yield from stored_tensors(directory, spec)[1]
        yield from tokenizer_problems(directory)


def check_export(config: Config) -> Iterator[Problem]:
    """The export replaces a directory of its name: it must not be anything else that is there, or is needed."""
    key, name = "export.directory", config.export.directory
    if not config.export.enabled:
        return
    if name in (".", "..", *_RUN_DIRECTORY):
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


def is_replaceable(target: Path) -> bool:
    """Whether an export may take the place of what is there: nothing, an empty directory, or a model directory."""
    if target.is_dir():
        return (target / "config.json").is_file() or not any(target.iterdir())
    return not target.exists()
