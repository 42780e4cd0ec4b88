"""Rows of data files: where each stands, its rendered text, and what is wrong with it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, Literal

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data.data_files import find_files
from ctpo_megatron.data.hub import HubFiles
from ctpo_megatron.data.marks import Offered
from ctpo_megatron.data.messages import ChatMessage, plain_messages, plain_tools
from ctpo_megatron.data.problems import Problems
from ctpo_megatron.data.tables import Table, read_rows

_EXAMPLES = 5

Rule = Literal["refuse", "drop"]
Location = tuple[Path, int]
"""File, and row in it."""
Cell = tuple[str, object, str]
"""Column, value, and the problem."""


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """How the rows of files are read and rendered.

    tool_schemas: passed to the chat template for rows without their own `tools`. system_prompt: becomes part of the
    messages of every row. limit: rows to read from each file. began: the date that a chat template writes; None: now.
    hub: what names of the Hub stand for.
    """

    tool_schemas: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: SystemPrompt = SystemPrompt()  # noqa: RUF009 - it is immutable
    limit: int | None = None
    began: datetime | None = None
    hub: Mapping[str, HubFiles] = field(default_factory=dict)

    @cached_property
    def template_options(self) -> dict[str, Any]:
        """What the chat template is called with."""
        clock = {"strftime_now": self.began.strftime} if self.began else {}
        return {**clock, **self.chat_template_kwargs}

    @cached_property
    def _offered(self) -> Offered:
        return [dict(schema) for schema in self.tool_schemas] or None

    def tools_of(self, cells: Mapping[str, Any]) -> Offered:
        """Return the tools of a row: its own, or the tools for all rows."""
        return plain_tools(cells["tools"]) if cells.get("tools") else self._offered

    def messages_of(self, value: Sequence[Mapping[str, Any]]) -> tuple[tuple[ChatMessage, ...], str | None]:
        """Checked messages as templates expect them, after the system prompt, and the reason why this cannot be."""
        try:
            return self.system_prompt.before(plain_messages(value)), None
        except ValueError as error:
            return (), str(error)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that was left out, the configuration key responsible, and the reason."""

    file: Path
    row: int
    id: str
    rule: str
    reason: str


@dataclass
class RowSet(ABC):
    """The usable rows of some files, in their order; what is made of them is in a subclass.

    rows: number of rows of each file, read or not. messages: as the chat template gets them. texts: rendered; empty
    where the template refused. problems: what refuses the data; warnings: what may be wrong. ignored: columns of a
    file that would change what the rows mean. hub: what names of the Hub among the files stand for.
    """

    called: ClassVar[str] = "rows"

    places: list[Location] = field(default_factory=list)
    messages: list[tuple[ChatMessage, ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: dict[Path, int] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    warnings: Problems = field(default_factory=Problems)
    left_out: list[LeftOut] = field(default_factory=list)
    ignored: dict[Path, list[str]] = field(default_factory=dict)
    hub: Mapping[str, HubFiles] = field(default_factory=dict)
    _contents: dict[Path, blake2b] = field(default_factory=dict)

    def read(
        self, files: Sequence[str], required: Sequence[str], optional: Sequence[str], rules: RowRules
    ) -> Iterator[tuple[Location, dict[str, Any]]]:
        """Place and cells of every row; the caller gives those that it can use to `add`. Notes what is wrong."""
        self.hub = {name: rules.hub[name] for name in files if name in rules.hub}
        for file in find_files(files, self.problems, rules.hub):
            self.rows[file] = 0
            self._contents[file] = blake2b(digest_size=16)
            for row, cells in read_rows(file, required, optional, self.problems, rules.limit, self._see):
                yield (file, row), cells
            if rules.limit is not None and self.rows[file] > rules.limit:
                del self._contents[file]
        if not self.places and not self.problems.lines:
            self.problems.general(f"no {self.called} in {', '.join(files)}")

    def add(self, place: Location, cells: Mapping[str, Any], said: tuple[ChatMessage, ...]) -> None:
        """Add a row that can be used, with its messages."""
        self.messages.append(said)
        self.places.append(place)
        self.texts.append("")
        plain = {name: cell for name, cell in cells.items() if cell is not None}
        self._contents[place[0]].update(json.dumps(plain, sort_keys=True, default=str).encode())

    def digests(self) -> dict[Path, str]:
        """blake2b-128, in hexadecimal, of each file that was read whole, whatever its format."""
        return {file: content.hexdigest() for file, content in self._contents.items()}

    def _see(self, file: Path, table: Table) -> None:
        self.rows[file] = table.count
        if table.media:
            self.ignored[file] = table.media

    def exclude(self, cells: Mapping[int, Cell], key: str = "", rule: Rule = "refuse") -> None:
        """Report rows by their index, for a cell of each, as errors; or leave them out, as the key says.

        key: of the configuration, if leaving them out is offered.
        """
        if rule == "refuse":
            fix = f"; or set {key}: drop" if key else ""
            for index, (column, value, reason) in list(cells.items())[:_EXAMPLES]:
                self.problems.row(*self.places[index], column, value, reason + fix)
            if (more := len(cells) - _EXAMPLES) > 0:
                column = next(iter(cells.values()))[0]
                self.problems.general(f"{_more(more)} with such a {column!r}, {len(cells)} in all")
            return
        for index, (_, _, reason) in cells.items():
            file, row = self.places[index]
            self.left_out.append(LeftOut(file, row, self.name(index), key, reason))
        self.keep([index for index in range(len(self.places)) if index not in cells])

    def warn(self, cells: Mapping[int, Cell]) -> None:
        """Warn of rows by their index: the first of them, and how many more there are."""
        for index, (column, value, reason) in list(cells.items())[:1]:
            others = f"; so it is in {_more(len(cells) - 1)}" if len(cells) > 1 else ""
            self.warnings.row(*self.places[index], column, value, reason + others)

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the id of a row."""

    @abstractmethod
    def tokens(self, index: int) -> Sequence[int]:
        """Return the token ids of a row."""

    def keep(self, indices: Sequence[int]) -> None:
        """Forget all other rows."""
        self.places = [self.places[index] for index in indices]
        self.messages = [self.messages[index] for index in indices]
        self.texts = [self.texts[index] for index in indices]


def _more(count: int) -> str:
    return f"{count:,} more row{'s' * (count > 1)}"
