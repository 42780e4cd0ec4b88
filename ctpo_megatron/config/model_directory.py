"""A Hugging Face model directory: family and shape from config.json, and checks of its files. No model library.

Only the header of a safetensors file is read: 8 bytes of length, then JSON. The library would not name the wrong tensor
or bytes, and the base install lacks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import ne
from pathlib import Path
from typing import Any

from ctpo_megatron.base.extensions import ExtensionError, activate, load
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.load import config_folders, locate
from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.schema import Config, ModelConfig
from ctpo_megatron.models import FAMILIES, ModelFamily, ModelSpec, Shape

_TASK = "toolmath"
"""Folder of the quickstart's task, which `examples.toolmath` writes."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files with a vocabulary; without any of them transformers 5 creates an empty tokenizer."""

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of weight dtypes; integers and 8-bit floats would need a scale."""
_COMPUTED = "rotary_emb.inv_freq"
"""Suffix of tensors in old files that transformers ignores: they follow from config.json."""
_HEADER_LIMIT = 100_000_000
"""Largest header in bytes, as in safetensors."""
_PIECE = 16 << 20
_SHOWN = 20
_MODELS = "models"
"""Folder of configs/ with config.json files of models."""


def spec_for(config: Config) -> ModelSpec:
    """Spec of `model.path`. Raises ConfigError."""
    path = Path(config.model.path)
    if not path.is_dir():
        fix = "give a directory in Hugging Face format"
        if command := task_command(path):
            fix = f"{command} writes it"
        elif config.model.path.count("/") == 1 and not path.is_absolute():
            fix += f"; a Hub model first: hf download {config.model.path} --local-dir DIRECTORY"
        raise ConfigError([Problem("model.path", "no such directory", fix, config.model.path)])
    return read_spec(path, family_for(config.model, config.extensions.path))


def task_command(path: Path) -> str:
    """Returns the command that writes a file of the quickstart's task; "" for any other file."""
    folder = next((folder for folder in (path, *path.parents) if folder.name == _TASK), None)
    return f"python -m examples.toolmath {folder}" if folder else ""


def family_for(model: ModelConfig, search_path: Sequence[str] | None) -> ModelFamily | None:
    """Return the user's family that `model.family` names, found through `extensions.path`. Raises ConfigError."""
    return None if model.family is None else load_family(model.family, search_path or ())


def load_family(extension: Extension, search_path: Sequence[str]) -> ModelFamily:
    """Return a user's family by its import path. Raises ConfigError."""
    activate(search_path)
    try:
        family = load(extension.name)(**extension.arguments)
    except (ExtensionError, TypeError) as error:
        raise ConfigError(
            [Problem("model.family", str(error), "see docs/extending.md#model-family", extension.name)]
        ) from error
    if not isinstance(family, ModelFamily):
        fix = "name a subclass of ctpo_megatron.models.ModelFamily (docs/extending.md#model-family)"
        raise ConfigError([Problem("model.family", f"makes a {type(family).__name__}", fix, extension.name)])
    return family


_AGAIN = "download or copy the model again"


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
    except ValueError as error:
        where, why = (f"{file}:{error.lineno}", error.msg) if isinstance(error, json.JSONDecodeError) else (file, error)
        raise ConfigError([Problem("model.path", f"{where}: not valid JSON: {why}", _AGAIN)]) from error
    if not isinstance(raw, dict):
        raise ConfigError([Problem("model.path", "config.json must hold a JSON object", _AGAIN, where=str(file))])
    named = raw.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else None)
    if family is not None and architecture != family.architecture:
        message = f"architecture {architecture} is not the one of model.family, {family.architecture}"
        raise ConfigError([Problem("model.path", message, where=str(file))])
    if family is None and architecture not in FAMILIES:
        fix = f"supported: {', '.join(FAMILIES)}, or your own in model.family (docs/extending.md#model-family)"
        raise ConfigError(
            [Problem("model.path", f"architecture {architecture} is not supported", fix, where=str(file))]
        )
    family = family or FAMILIES[architecture]
    refused = [Problem("model.path", *refusal, where=str(file)) for refusal in family.refusals(raw)]
    if refused:
        raise ConfigError(refused)
    return family.read(raw)


def read_shapes(path: str | Path) -> ModelSpec:
    """Spec of a config.json without its model, also searched in configs/models. Raises ConfigError."""
    return read_spec(locate(path, ".json", _MODELS))


def known_shapes() -> list[str]:
    """Names of the files in configs/models, which `read_shapes` takes."""
    return sorted({file.name for folder in config_folders() for file in (folder / _MODELS).glob("*.json")})


@dataclass(frozen=True)
class Stored:
    """The file, shape and dtype (safetensors' name) of a stored tensor, and its first byte in the file."""

    file: Path
    shape: Shape
    dtype: str
    start: int

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, in pieces of `_PIECE`."""
        left = _BYTES[self.dtype] * prod(self.shape)
        with self.file.open("rb") as data:
            data.seek(self.start)
            while left > 0 and (piece := data.read(min(left, _PIECE))):
                left -= len(piece)
                yield piece


def stored_tensors(directory: Path, spec: ModelSpec | None) -> tuple[dict[str, Stored], list[Problem]]:
    """Return every tensor of a model directory by name, and all problems with the files.

    Problems are missing, truncated or invalid files; with `spec`, also tensors that are missing, surplus, of another
    shape or not floating-point. A tied model may have an output layer (of the embedding's shape), and rotary
    frequencies are ignored.
    """
    try:
        listed = _index(directory)
    except ConfigError as error:
        return {}, [*error.problems]
    found: dict[str, Stored] = {}
    problems: list[Problem] = []
    for file in [directory / SINGLE] if listed is None else sorted(set(listed.values())):
        try:
            found |= _header(directory, file)
        except ConfigError as error:
            problems += error.problems
    if problems:
        return found, problems  # tensors of unreadable files would be reported as missing
    if listed is not None:
        lacking = [name for name, file in listed.items() if name not in found or found[name].file != file]
        problems += _list(directory, "named in the index, but not in its file: ", lacking)
        found = {name: stored for name, stored in found.items() if name in listed}
    found = {name: stored for name, stored in found.items() if not name.endswith(_COMPUTED)}
    if spec is not None and not problems:
        problems += _wrong_tensors(directory, found, spec)
    return found, problems


def check_tied(directory: Path, stored: Mapping[str, Stored], spec: ModelSpec) -> None:
    """Raise ConfigError where a tied model has an output layer that is not its embedding, of all its bytes.

    stored: of `stored_tensors`, without problems.
    """
    head, embedding = stored.get(spec.family.head), stored[spec.family.embedding]
    if not spec.tie_word_embeddings or head is None:
        return
    if head.dtype != embedding.dtype or any(map(ne, head.pieces(), embedding.pieces())):
        message = f"config.json ties the embeddings, but {spec.family.head} differs from {spec.family.embedding}"
        fix = "set tie_word_embeddings: false there, or remove the tensor that is wrong"
        raise ConfigError([_problem(directory, message, fix)])


def tokenizer_problems(directory: Path) -> list[Problem]:
    """Return whether a file with a vocabulary is missing."""
    if any((directory / name).is_file() for name in TOKENIZERS):
        return []
    return [_problem(directory, f"has no tokenizer: none of {', '.join(TOKENIZERS)}", "copy it there")]


def is_replaceable(target: Path) -> bool:
    """Return whether an export may replace what is there: nothing, an empty directory, or a model directory."""
    if target.is_dir():
        return (target / "config.json").is_file() or not any(target.iterdir())
    return not target.exists()


def _index(directory: Path) -> dict[str, Path] | None:
    """The file of each tensor according to the index; None: there is a single file. Raises ConfigError."""
    index, single = directory / INDEX, directory / SINGLE
    if not index.is_file():
        if single.is_file():
            return None
        fix = "download or copy the model again, with its *.safetensors"
        if any(directory.glob("*.bin")):
            fix = "convert the checkpoint with save_pretrained(..., safe_serialization=True)"
        raise ConfigError([_problem(directory, f"has neither {SINGLE} nor {INDEX}", fix)])
    fix = f"remove what is wrong, or {_AGAIN}"
    try:
        listed = {str(name): directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{INDEX} is no index of tensors ({type(error).__name__}: {error})"
        raise ConfigError([_problem(directory, message, fix)]) from error
    if single.is_file() and single not in listed.values():
        message = f"has both {SINGLE}, which transformers reads, and {INDEX}: which are the weights?"
        raise ConfigError([_problem(directory, message, fix)])
    return listed


def _header(directory: Path, file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, of which the header gives the size. Raises ConfigError."""
    size = 0
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if length > min(_HEADER_LIMIT, size):
                raise ValueError(length)
            header: dict[str, Any] = json.loads(data.read(length))
        header.pop("__metadata__", None)
        stored = {
            name: Stored(file, tuple(map(int, t["shape"])), str(t["dtype"]), 8 + length + int(t["data_offsets"][0]))
            for name, t in header.items()
        }
        end = 8 + length + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
        wrong = "" if end == size else f"has {size} bytes, but its header asks for {end}"
    except FileNotFoundError:
        wrong = "is missing"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror}"
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError):
        wrong = f"({size} bytes) is no safetensors file, or is cut short"
    if wrong:
        raise ConfigError([_problem(directory, f"{file.name} {wrong}", "download or copy it again")])
    return stored


def _wrong_tensors(directory: Path, found: Mapping[str, Stored], spec: ModelSpec) -> Iterator[Problem]:
    family = spec.family
    expected = family.tensors(spec)
    yield from _list(directory, "missing: ", expected.keys() - found.keys())
    if spec.tie_word_embeddings and family.head in found:
        expected[family.head] = expected[family.embedding]
    yield from _list(directory, "not used by this architecture: ", found.keys() - expected.keys())
    other = {name: stored.shape for name, stored in found.items() if expected.get(name, stored.shape) != stored.shape}
    lines = [f"{name} is {other[name]}, but config.json makes it {expected[name]}" for name in other]
    types = {name: stored.dtype for name, stored in found.items() if name in expected and stored.dtype not in _BYTES}
    lines += [f"{name} is {types[name]}, which is none of {', '.join(_BYTES)} (quantized?)" for name in types]
    yield from _list(directory, "", lines)


def _list(directory: Path, kind: str, texts: Iterable[str]) -> Iterator[Problem]:
    """One problem per text, up to a limit."""
    texts = sorted(texts)
    yield from (_problem(directory, f"{kind}{text}") for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        yield _problem(directory, f"{kind}{len(texts) - _SHOWN} more tensors")


def _problem(directory: Path, message: str, fix: str = "") -> Problem:
    return Problem("model.path", message, fix, str(directory))
