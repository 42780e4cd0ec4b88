"""Checks the files of a Hugging Face model directory against the tensors that they should contain.

Only the header of a safetensors file is read: 8 bytes of length, then JSON. The library would not name the wrong tensor
or bytes, and the base install lacks it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ctpo_megatron.config.problems import Problem
from ctpo_megatron.models import ModelSpec, Shape

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files with a vocabulary; without any of them transformers 5 creates an empty tokenizer."""

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of weight dtypes; integers and 8-bit floats would need a scale."""
_COMPUTED = "rotary_emb.inv_freq"
"""Suffix of tensors in old files that transformers ignores: they follow from config.json."""
_HEADER_LIMIT = 100_000_000
"""Largest header in bytes, as in safetensors."""
_SHOWN = 20


@dataclass(frozen=True)
class Stored:
    """The file, shape and dtype (safetensors' name) of a stored tensor."""

    file: Path
    shape: Shape
    dtype: str


class _Unreadable(Exception):
    """A file is invalid; the message names it."""


def stored_tensors(directory: Path, spec: ModelSpec | None) -> tuple[dict[str, Stored], list[Problem]]:
    """Every tensor of a model directory by name, and all problems with the files.

    Problems are missing, truncated or invalid files; with `spec`, also tensors that are missing, surplus, of another
    shape or not floating-point. A tied model may have an output layer (of the embedding's shape), and rotary
    frequencies are ignored.
    """
    try:
        listed = _index(directory)
    except _Unreadable as reason:
        return {}, [_problem(directory, str(reason), _fix(directory))]
    found: dict[str, Stored] = {}
    problems = []
    for file in [directory / SINGLE] if listed is None else sorted(set(listed.values())):
        try:
            found |= _header(file)
        except _Unreadable as reason:
            problems.append(_problem(directory, str(reason), "download or copy it again"))
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


def tokenizer_problems(directory: Path) -> list[Problem]:
    """Whether a file with a vocabulary is missing."""
    if any((directory / name).is_file() for name in TOKENIZERS):
        return []
    return [_problem(directory, f"has no tokenizer: none of {', '.join(TOKENIZERS)}", "copy it there")]


def is_replaceable(target: Path) -> bool:
    """Whether an export may replace what is there: nothing, an empty directory, or a model directory."""
    if target.is_dir():
        return (target / "config.json").is_file() or not any(target.iterdir())
    return not target.exists()


def _index(directory: Path) -> dict[str, Path] | None:
    """The file of each tensor according to the index; None: there is a single file. Raises _Unreadable."""
    index = directory / INDEX
    if not index.is_file():
        if not (directory / SINGLE).is_file():
            raise _Unreadable(f"has neither {SINGLE} nor {INDEX}")
        return None
    try:
        listed = {str(name): directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
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


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, which must fill it without gaps. Raises _Unreadable."""
    size = 0
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            length = int.from_bytes(data.read(8), "little")
            if length > min(_HEADER_LIMIT, size):
                raise ValueError(length)
            header: dict[str, Any] = json.loads(data.read(length))
        header.pop("__metadata__", None)
        stored = {name: Stored(file, tuple(map(int, t["shape"])), str(t["dtype"])) for name, t in header.items()}
        places = {name: (int(t["data_offsets"][0]), int(t["data_offsets"][1])) for name, t in header.items()}
    except FileNotFoundError as error:
        raise _Unreadable(f"{file.name} is missing") from error
    except OSError as error:
        raise _Unreadable(f"{file.name} cannot be read: {error.strerror}") from error
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _Unreadable(f"{file.name} ({size} bytes) is no safetensors file, or is cut short") from error
    end = 8 + length + max((end for _, end in places.values()), default=0)
    if end != size:
        raise _Unreadable(f"{file.name} has {size} bytes, but its header asks for {end}")
    _check_places(file, stored, places)
    return stored


def _check_places(file: Path, stored: Mapping[str, Stored], places: Mapping[str, tuple[int, int]]) -> None:
    """Check that tensors are contiguous, each with the size of its shape and dtype. Raises _Unreadable."""
    due = 0
    for name, (start, end) in sorted(places.items(), key=lambda item: item[1]):
        each = _BYTES.get(stored[name].dtype)
        if start != due:
            raise _Unreadable(f"{file.name}: its header has {name} begin at byte {start}, where {due} was due")
        if each is not None and end - start != each * prod(stored[name].shape):
            form = f"{stored[name].dtype} {stored[name].shape}"
            raise _Unreadable(f"{file.name}: its header gives {end - start} bytes to {name}, which is {form}")
        due = end


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
