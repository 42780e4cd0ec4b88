"""How a configuration names a part: one of ours by a word, a user's as `package.module:Name`, with arguments beside."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class Extension(BaseModel):
    """A part by name. In YAML either the name alone or `{name: ..., arguments: {...}}`.

    name: a word (one of our own parts), or `package.module:Name`, found through `extensions.path`.
    arguments: keyword arguments that the part is made or called with.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    arguments: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Extension) or (
            isinstance(value, dict) and {"name"} <= value.keys() <= set(cls.model_fields)
        ):
            return value
        raise PydanticCustomError("extension", "must be a name, or {{name: ..., arguments: {{...}}}}")

    @property
    def is_path(self) -> bool:
        """Whether the name is an import path, not one of our own words."""
        return ":" in self.name

    def __str__(self) -> str:
        return self.name
