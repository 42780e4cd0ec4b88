"""The files of a Hugging Face model directory: what they should hold, what they hold, and how the two differ.

safetensors is read here by its header alone (8 bytes of length, then JSON), since the base install has no such library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_megatron.config.problems import Problem
from ctpo_megatron.models import ModelSpec, Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that hold a vocabulary; without any of them transformers 5 makes an empty tokenizer."""

_HEADER_LIMIT = 100_000_000
"""Bytes; safetensors' own."""
_SHOWN = 20


@dataclass(frozen=True)
class Stored:
    """Where a tensor is, and its shape there."""

    file: Path
    shape: Shape


class _Unreadable(Exception):
    """A file is not what it should be; the message names it."""


def stored_tensors(directory: Path, spec: ModelSpec | None) -> tuple[dict[str, Stored], list[Problem]]:
    """Every tensor of a model directory by name, and everything that is wrong with the files.

    Files that are missing, cut short or no safetensors; with `spec`, also tensors that are missing, surplus or of
    another shape. A tied model may have an output layer (of the embedding's shape).
    """
    try:
        listed = _index(directory)
    except _Unreadable as reason:
        return {}, [_problem(directory, str(reason), _fix(directory))]
    found: dict[str, Stored] = {}
    problems = []
    for file in [directory / SINGLE] if listed is None else sorted(set(listed.values())):
        try:
            found |= {name: Stored(file, shape) for name, shape in _header(file).items()}
        except _Unreadable as reason:
            problems.append(_problem(directory, str(reason), "download or copy it again"))
    if problems:
        return found, problems  # what is in those files would be called missing
    if listed is not None:
        lacking = [name for name, file in listed.items() if name not in found or found[name].file != file]
        problems += _list(directory, "named in the index, but not in its file: ", lacking)
        found = {name: stored for name, stored in found.items() if name in listed}
    if spec is not None and not problems:
        problems += _wrong_tensors(directory, found, spec)
    return found, problems


def tokenizer_problems(directory: Path) -> list[Problem]:
    """Whether a file with a vocabulary is missing."""
    if any((directory / name).is_file() for name in TOKENIZERS):
        return []
    return [_problem(directory, f"has no tokenizer: none of {', '.join(TOKENIZERS)}", "copy it there")]


def _index(directory: Path) -> dict[str, Path] | None:
    """The file of each tensor as the index says; None: there is a single file. Raises _Unreadable."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise _Unreadable(f"has neither {SINGLE} nor {INDEX}")
        return None
    try:
        listed = {str(name): directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unreadable(f"{INDEX} is no index of tensors ({type(error).__name__}: {error})") from error
    single = directory / SINGLE
    if single.is_file() and single not in listed.values():
        raise _Unreadable(f"has both {SINGLE}, which transformers reads, and {INDEX}: which are the weights?")
    return listed


def _fix(directory: Path) -> str:
    if (directory / INDEX).is_file():
        return "remove what is wrong, or download or copy the model again"
    if any(directory.glob("*.bin")):
        return "convert the checkpoint with save_pretrained(..., safe_serialization=True)"
    return "download or copy the model again, with its *.safetensors"


def _header(file: Path) -> dict[str, Shape]:
    """Name and shape of each tensor in a safetensors file, whose length is checked. Raises _Unreadable."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if length > min(_HEADER_LIMIT, size):
                raise ValueError(length)
            header: Mapping[str, Any] = json.loads(data.read(length))
        header = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise _Unreadable(f"{file.name} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _Unreadable(f"{file.name} ({size} bytes) is no safetensors file, or is cut short") from error
    if end != size:
        raise _Unreadable(f"{file.name} has {size} bytes, but its header asks for {end}")
    return shapes


def _wrong_tensors(directory: Path, found: Mapping[str, Stored], spec: ModelSpec) -> Iterator[Problem]:
    family = spec.family
    expected = family.tensors(spec)
    yield from _list(directory, "missing: ", expected.keys() - found.keys())
    if spec.tie_word_embeddings and family.head in found:
        expected[family.head] = expected[family.embedding]
    yield from _list(directory, "not used by this architecture: ", found.keys() - expected.keys())
    other = {name: stored.shape for name, stored in found.items() if expected.get(name, stored.shape) != stored.shape}
    lines = [f"{name} is {other[name]}, but config.json makes it {expected[name]}" for name in other]
    yield from _list(directory, "", lines)


def _list(directory: Path, kind: str, texts: Iterable[str]) -> Iterator[Problem]:
    """One problem each, the first so many."""
    texts = sorted(texts)
    yield from (_problem(directory, f"{kind}{text}") for text in texts[:_SHOWN])
    if len(texts) > _SHOWN:
        yield _problem(directory, f"{kind}{len(texts) - _SHOWN} more tensors")


def _problem(directory: Path, message: str, fix: str = "") -> Problem:
    return Problem("model.path", message, fix, str(directory))
