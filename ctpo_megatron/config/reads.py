"""Which keys name files that a run reads: markers in the schema, and a walk that collects the values."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel


def _every(_value: str) -> bool:
    return True


def exists(value: str) -> bool:
    """Whether a text is the path of an existing file or folder."""
    return bool(value) and "\0" not in value and os.path.exists(value)


@dataclass(frozen=True)
class Reads:
    """Marks a key of the schema (`Annotated[str, Reads()]`) whose texts are paths or glob patterns that a run reads.

    when: which texts are paths, for a key that may hold other texts.
    """

    when: Callable[[str], bool] = _every


def input_paths(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Path]]:
    """Dotted key and path of every input of a configuration; a pattern yields itself and all its matches."""
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{field.alias or name}", getattr(section, name)
        marks = [mark for mark in field.metadata if isinstance(mark, Reads)]
        for mark in marks:
            for text in filter(mark.when, _texts(value)):
                yield from ((key, path) for path in _paths(text))
        for inner, part in _sections(value, key):
            yield from input_paths(part, f"{inner}.")


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part)


def _paths(text: str) -> Iterator[Path]:
    yield Path(text)
    if glob.has_magic(text):
        yield from map(Path, glob.iglob(text, recursive=True))


def _sections(value: Any, key: str) -> Iterator[tuple[str, BaseModel]]:
    """The sections in a value, with their dotted keys."""
    if isinstance(value, BaseModel):
        yield key, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _sections(part, f"{key}.{name}")
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _sections(part, f"{key}.{number}")
