"""Prompt: one question as it is put to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task, already rendered with the model's chat template up to the point where the model speaks."""

    id: str
    data_source: str
    messages: tuple[dict[str, str], ...]
    answer: str
    token_ids: tuple[int, ...]
    extra: dict[str, Any] = field(default_factory=dict)
