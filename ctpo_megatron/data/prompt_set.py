"""The prompts of some files with their locations, and the rows that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data.problems import Problems
from ctpo_megatron.data.prompt import Prompt

_EXAMPLES = 5

Rule = Literal["refuse", "drop"]
Location = tuple[Path, int]
"""File, and row in it."""
Cell = tuple[str, object, str]
"""Column, value, and the problem."""


@dataclass(frozen=True)
class PromptRules:
    """How prompt files become prompts.

    max_prompt_tokens: of a rendered prompt; overlong: whether longer ones are errors or left out.
    tool_schemas: passed to the chat template for rows without their own `tools`.
    held_out: an id must be unique within its file only (if files share ids, every id is prefixed by the file's name),
    and no rows are left out. limit: rows to read from each file. system_prompt: becomes part of the messages of every
    prompt.
    """

    max_prompt_tokens: int
    overlong: Rule = "refuse"
    tool_schemas: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False
    limit: int | None = None
    system_prompt: SystemPrompt = SystemPrompt()  # noqa: RUF009 - it is immutable


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that was left out, the configuration key responsible, and the reason."""

    file: Path
    row: int
    id: str
    rule: str
    reason: str


@dataclass
class PromptSet:
    """The prompts of some files with their locations, problems, and rows that were left out.

    rows: number of rows of each file, read or not. texts: the rendered prompts.
    """

    prompts: list[Prompt] = field(default_factory=list)
    places: list[Location] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: dict[Path, int] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    left_out: list[LeftOut] = field(default_factory=list)

    def exclude(self, cells: Mapping[int, Cell], key: str = "", rule: Rule = "refuse") -> None:
        """Report prompts by their index, for a cell of each, as errors; or leave them out, as the key says.

        key: of the configuration, if leaving them out is offered.
        """
        fix = f"; or set {key}: drop" if key else ""
        for count, (index, (column, value, reason)) in enumerate(cells.items()):
            file, row = self.places[index]
            if rule == "drop":
                self.left_out.append(LeftOut(file, row, self.prompts[index].id, key, reason))
            elif count < _EXAMPLES:
                self.problems.row(file, row, column, value, reason + fix)
        if rule == "refuse" and len(cells) > _EXAMPLES:
            self.problems.general(f"{len(cells) - _EXAMPLES} more rows with such a {column!r}, {len(cells)} in all")
        if rule == "refuse":
            return
        kept = [index for index in range(len(self.prompts)) if index not in cells]
        self.prompts = [self.prompts[index] for index in kept]
        self.places = [self.places[index] for index in kept]
        self.texts = [self.texts[index] for index in kept]
