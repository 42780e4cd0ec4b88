"""Which keys name files that a run reads: markers in the schema, and a walk that collects the values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ctpo_megatron.base.files import is_pattern, matching


def exists(value: str) -> bool:
    """Return whether a text is the path of an existing file or folder."""
    return bool(value) and "\0" not in value and os.path.exists(value)


def at_home(text: str) -> str:
    """Return a path whose `~` or `~user` at its beginning is that home directory."""
    return os.path.expanduser(text)


@dataclass(frozen=True)
class Reads:
    """Marks a key of the schema (`Annotated[str, Reads()]`) whose texts are paths or glob patterns that a run reads.

    Their `~` is the home directory. when: which texts are paths, for a key that may hold other texts.
    """

    when: Callable[[str], bool] = lambda _text: True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._at_home, handler(source))

    def _at_home(self, value: Any) -> Any:
        """The value with every path in it as `at_home` has it."""
        if isinstance(value, str):
            return at_home(value) if self.when(at_home(value)) else value
        if isinstance(value, Mapping):
            return {key: self._at_home(part) for key, part in value.items()}
        return type(value)(map(self._at_home, value)) if isinstance(value, list | tuple) else value


def input_paths(whole: BaseModel) -> Iterator[tuple[str, Path]]:
    """Dotted key and path of every input of a configuration; a pattern yields itself and all its matches."""
    for place, section in sections_in(whole):
        for name, field in type(section).model_fields.items():
            key, value = f"{place}.{name}".lstrip("."), getattr(section, name)
            for mark in (mark for mark in field.metadata if isinstance(mark, Reads)):
                for text in filter(mark.when, _texts(value)):
                    yield from ((key, path) for path in (Path(text), *(matching(text) if is_pattern(text) else ())))


def sections_in(value: Any, key: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Dotted key and section of every section in a value, itself included; list items are numbered from 0."""
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, BaseModel):
        yield key, value
        inside = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, tuple | list):
        inside = enumerate(value)
    for name, part in inside:
        yield from sections_in(part, f"{key}.{name}".lstrip("."))


def _texts(value: Any) -> Iterator[str]:
    """All strings in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
