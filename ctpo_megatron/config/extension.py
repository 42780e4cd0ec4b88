"""How a configuration names a part: a built-in by one word, a user's as `package.module:Name`, with arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ctpo_megatron.config.reads import Reads, exists, sections_in


class Extension(BaseModel):
    """A part by name. In YAML either the name alone or `{name: ..., arguments: {...}}`.

    name: one word (a built-in part), or `package.module:Name`, found through `extensions.path`.
    arguments: keyword arguments for creating or calling the part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    arguments: Annotated[dict[str, Any], Reads(exists)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        is_mapping = isinstance(value, dict) and {"name"} <= value.keys() <= cls.model_fields.keys()
        if is_mapping or isinstance(value, Extension):
            return value
        raise PydanticCustomError("extension", "must be a name, or {name: ..., arguments: {...}}")

    @property
    def is_path(self) -> bool:
        """Whether the name is an import path, not a built-in word."""
        return ":" in self.name

    @property
    def short_name(self) -> str:
        """The word, or the name after the module; used in metric names."""
        return self.name.rpartition(":")[2]

    def __str__(self) -> str:
        return self.name


def named_extensions(section: BaseModel) -> Iterator[tuple[str, Extension]]:
    """Dotted key and Extension of every part in a configuration; list items are numbered from 0."""
    return ((key, part) for key, part in sections_in(section) if isinstance(part, Extension))
