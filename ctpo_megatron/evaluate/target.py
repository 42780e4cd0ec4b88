"""The target of an evaluation: the model that a path refers to, its configuration, its fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.base.exports import checkpoint_steps, exports
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import (
    ClusterConfig,
    Config,
    ConfigError,
    ObjectiveConfig,
    PlacementConfig,
    PolicyConfig,
    Problem,
    Sources,
    WeightsConfig,
    load_config,
    load_with_sources,
    run_chat_template,
)
from ctpo_megatron.config.schema import ExtensionsConfig
from ctpo_megatron.data.records import Prompt

_BLOCK, _BLOCKS = 1 << 16, 64
"""Number and size of evenly spaced blocks of a weight file that are hashed, in addition to its size."""


@dataclass(frozen=True)
class Target:
    """A model in Hugging Face format, and the configuration file of its run, if any.

    step: of the weights; None: not known, or the model itself was named. why: how it was chosen; empty: it was named.
    """

    model: Path
    config: Path | None
    step: int | None = None
    why: str = ""


def find_target(path: Path, config: Path | None) -> Target:
    """Resolve `path`: a Hugging Face directory, alone or in a run directory, or a run's export of the highest step.

    config: used instead of the run's. Raises ConfigError, also where a checkpoint is newer than every export.
    """
    if (path / "config.json").is_file():
        of_run = RunPaths(path.resolve().parent).config
        return Target(path, config or (of_run if of_run.is_file() else None))
    paths = RunPaths(path)
    run = paths.config
    if not run.is_file():
        fix = "give a model in Hugging Face format, or a run directory"
        raise ConfigError([Problem("MODEL", "is no model and no run (no config.json, no config.yaml)", fix, str(path))])
    models = exports(path, load_config(run).export.directory)
    if not models:
        fix = f"type `ctpo export {path}`, which writes the newest checkpoint as one"
        raise ConfigError([Problem("MODEL", "the run has no model in Hugging Face format", fix, str(path))])
    newest = max(models, key=lambda model: model.step)
    of_step = f"step {newest.step}" if newest.step >= 0 else "a step that it does not record"
    if (saved := max(checkpoint_steps(path), default=-1)) > newest.step:
        message = f"its checkpoint of step {saved} is newer than every export; {newest.path} is of {of_step}"
        raise ConfigError([Problem("MODEL", message, f"type `ctpo export {path}`, or name a model", str(path))])
    why = f"{of_step}, {'the highest of its exports' if len(models) > 1 else 'its only export'}"
    return Target(newest.path, config or run, newest.step if newest.step >= 0 else None, why)


def read_config(target: Target, overrides: Sequence[str], gpus: int) -> tuple[Config, Sources]:
    """Return the configuration of an evaluation: the run's, without settings of training alone, and with the overrides.

    gpus: of this node. Unless overridden, there are as many engines as fit on the GPUs of all nodes, or one per node
    without GPUs. Without RAY_ADDRESS the cluster is one node.
    """
    base: dict[str, Any] = {"model.path": str(target.model), "eval.prompts": None, "rollout.engines": "auto"}
    if target.config is None:  # keys that the schema requires and an evaluation does not use
        base |= {"run.name": "eval", "run.steps": 0, "data.train": ["none"]}
    given = [f"{key}={json.dumps(value)}" for key, value in base.items()]
    config, sources = load_with_sources(target.config, [*given, *overrides])
    cluster = config.cluster if os.environ.get(ADDRESS) else ClusterConfig()
    without_trainer: dict[str, Any] = {"replay": None, "mismatch_limit": None, "weights": WeightsConfig()}
    without_trainer |= {"max_staleness": 0, "lag": 0}
    if config.rollout.engines == "auto":
        of_node = max(1, gpus // config.rollout.engine.tensor_parallel_size)
        without_trainer["engines"] = cluster.nodes * of_node
    rollout = config.rollout.model_copy(update=without_trainer)
    only_here: dict[str, Any] = {
        "sft": None,
        "objective": ObjectiveConfig(),
        "policy": PolicyConfig(),
        "placement": PlacementConfig(),
        "cluster": cluster,
        "rollout": rollout,
        "tracking": config.tracking.model_copy(update={"trackers": ()}),
        "extensions": config.extensions.model_copy(update={"path": _search_path(target, config.extensions, overrides)}),
    }
    return config.model_copy(update=only_here), sources


def _search_path(target: Target, extensions: ExtensionsConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Search path of users' parts: as given, else the run's own copies, else the existing configured folders."""
    if any(text.startswith("extensions.path=") for text in overrides):
        return extensions.path or ()
    if target.config is not None and (copies := RunPaths(target.config.parent).extensions).is_dir():
        return (str(copies.resolve()),)
    return tuple(folder for folder in extensions.path or () if Path(folder).is_dir())


def settings_of(config: Config, prompts: Sequence[Prompt]) -> Mapping[str, Any]:
    """Return everything that the samples and their scores depend on, by name, except their number."""
    rollout, sandbox = config.rollout, config.sandbox
    of_rollout = ("max_turns", "max_turn_tokens", "max_response_tokens", "max_observation_chars")
    settings: dict[str, Any] = {f"rollout.{name}": getattr(rollout, name) for name in of_rollout}
    # Omitted if unset, so that results of earlier versions can be continued.
    for name in ("max_tool_calls", "max_tool_s"):
        if (limit := getattr(rollout, name)) is not None:
            settings[f"rollout.{name}"] = limit
    for name in ("tools", "tool_parser", "environment"):
        settings[f"rollout.{name}"] = rollout.model_dump(mode="json", include={name})[name]
    if rollout.endpoint.agent is not None:
        settings["rollout.endpoint.agent"] = rollout.endpoint.agent.model_dump(mode="json")
    return settings | {
        "model": fingerprint(Path(config.model.path)),
        "model.chat_template": run_chat_template(config.model),
        "model.chat_template_kwargs": config.model.chat_template_kwargs,
        "prompts": _digest(json.dumps([[p.id, p.data_source, p.token_ids, p.answer] for p in prompts]).encode()),
        "run.seed": config.run.seed,
        "eval.temperature": config.eval.temperature,
        "eval.top_p": config.eval.top_p,
        "rollout.engine.max_model_len": rollout.engine.max_model_len,
        "rollout.engine.dtype": config.engine_dtype,
        "sandbox": sandbox.model_dump(mode="json", include={"run_timeout_s", "cpu_s", "memory_mb", "output_kb"}),
        "reward": config.reward.model_dump(mode="json", include={"function", "by_source"}),
    }


def fingerprint(model: Path) -> str:
    """Digest of a model directory, independent of its path: complete JSON files, and blocks of every weight file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([*model.glob("*.json"), *model.glob("*.jinja"), *model.glob("*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            step = max(_BLOCK, size // _BLOCKS) if file.suffix == ".safetensors" else _BLOCK
            for offset in range(0, size, step):
                opened.seek(offset)
                digest.update(opened.read(_BLOCK))
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
