"""Prompt: one question as the model receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, rendered with the model's chat template up to the start of the model's turn."""

    id: str
    data_source: str
    messages: tuple[dict[str, str], ...]
    answer: str
    token_ids: tuple[int, ...]
    extra: dict[str, Any] = field(default_factory=dict)
