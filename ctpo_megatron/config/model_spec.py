"""The model of a configuration: its family, and its shape from config.json. No model library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ctpo_megatron.base.extensions import ExtensionError, activate, load
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.locate import locate
from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.schema import Config, ModelConfig
from ctpo_megatron.config.task_schema import PrepareConfig, TinyModelConfig
from ctpo_megatron.models import FAMILIES, ModelFamily, ModelSpec

PREPARED = ("model", "train.parquet", "heldout.parquet", "sft.parquet")
"""Files that `prepare` writes to its directory."""


def spec_for(config: Config) -> ModelSpec:
    """Spec of `model.path`, or of the model that `prepare` will build there. Raises ConfigError."""
    path = Path(config.model.path)
    if config.prepare and will_be_prepared(config.prepare, path) and not (path / "config.json").exists():
        return _tiny_spec(config.prepare.model)
    if not path.is_dir():
        fix = "give a directory in Hugging Face format"
        if config.prepare is not None:
            fix += f", or {Path(config.prepare.directory) / 'model'} which `prepare` builds"
        elif config.model.path.count("/") == 1 and not path.is_absolute():
            fix += f"; a Hub model first: hf download {config.model.path} --local-dir DIRECTORY"
        raise ConfigError([Problem("model.path", "no such directory", fix, config.model.path)])
    return read_spec(path, family_for(config.model, config.extensions.path))


def will_be_prepared(prepare: PrepareConfig | None, path: Path) -> bool:
    """Whether `prepare` writes this path: model/ or one of its three parquet files."""
    if prepare is None:
        return False
    root = Path(prepare.directory)
    return path.absolute() in {(root / n).absolute() for n in PREPARED}


def family_for(model: ModelConfig, search_path: Sequence[str] | None) -> ModelFamily | None:
    """The user's family that `model.family` names, found through `extensions.path`. Raises ConfigError."""
    return None if model.family is None else load_family(model.family, search_path or ())


def load_family(extension: Extension, search_path: Sequence[str]) -> ModelFamily:
    """A user's family by its import path. Raises ConfigError."""
    activate(search_path)
    try:
        family = load(extension.name)(**extension.arguments)
    except (ExtensionError, TypeError) as error:
        raise ConfigError([Problem("model.family", str(error), "see docs/extend.md", extension.name)]) from error
    if not isinstance(family, ModelFamily):
        fix = "name a subclass of ctpo_megatron.models.ModelFamily (docs/extend.md)"
        raise ConfigError([Problem("model.family", f"makes a {type(family).__name__}", fix, extension.name)])
    return family


def read_spec(path: str | Path, family: ModelFamily | None = None) -> ModelSpec:
    """Spec of the model in a directory, or of a config.json alone. Raises ConfigError with everything unsupported.

    family: None: a built-in one, by the architecture in config.json.
    """
    file = Path(path) if Path(path).suffix == ".json" else Path(path) / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        fix = "model.path must be a directory in Hugging Face format"
        raise ConfigError([Problem("model.path", f"cannot read {file}: {error.strerror}", fix, str(path))]) from error
    except json.JSONDecodeError as error:
        raise ConfigError([Problem("model.path", f"{file}:{error.lineno}: not valid JSON: {error.msg}")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("model.path", f"{file}: not valid JSON: {error}")]) from error
    if not isinstance(raw, dict):
        raise ConfigError([Problem("model.path", "config.json must hold a JSON object", where=str(file))])
    named = raw.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else None)
    if family is not None and architecture != family.architecture:
        message = f"architecture {architecture} is not the one of model.family, {family.architecture}"
        raise ConfigError([Problem("model.path", message, where=str(file))])
    if family is None and architecture not in FAMILIES:
        fix = f"supported: {', '.join(FAMILIES)}, or your own in model.family (docs/extend.md)"
        raise ConfigError(
            [Problem("model.path", f"architecture {architecture} is not supported", fix, where=str(file))]
        )
    family = family or FAMILIES[architecture]
    refused = [Problem("model.path", *refusal, where=str(file)) for refusal in family.refusals(raw)]
    if refused:
        raise ConfigError(refused)
    return family.read(raw)


def read_shapes(path: str | Path) -> ModelSpec:
    """Spec of a config.json without its model, also searched in configs/ of the checkout. Raises ConfigError."""
    return read_spec(locate(path))


def _tiny_spec(model: TinyModelConfig) -> ModelSpec:
    """Spec of the model that `prepare` will build."""
    return ModelSpec(
        family=FAMILIES["Qwen3ForCausalLM"],
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=model.max_position_embeddings,
        vocab_size=0,
        tie_word_embeddings=model.tie_word_embeddings,
        qk_norm=True,
        rope_theta=model.rope_theta,
    )
