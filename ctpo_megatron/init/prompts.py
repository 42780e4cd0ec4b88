"""Reads the prompts of a user's file, whatever its columns, and writes them with ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.data import PromptColumns, Table, data_stem, number_text, open_table, prompt_columns

OURS = ("data_source", "prompt", "reward_model")
_FIRST = 1000
"""Rows by which the columns are found."""


class InitError(ValueError):
    """What `ctpo init` cannot make a configuration of; the message says what to change."""


@dataclass(frozen=True)
class UsersPrompts:
    """The prompts of a user's file as rows with our columns.

    columns: where they were found. others: the columns of the file that are neither prompt nor answer. left_out: rows
    without a question or an answer. is_ours: whether the file has our columns, and can be trained on as it is.
    """

    file: Path
    columns: PromptColumns
    others: tuple[str, ...]
    rows: Sequence[Mapping[str, Any]]
    left_out: int
    is_ours: bool

    @property
    def target(self) -> Path:
        """The file that `write` makes, in the working directory; the user's own, where that has our columns."""
        return self.file if self.is_ours else Path("data") / f"{data_stem(self.file)}.parquet"

    def needs_instruction(self, word: str) -> bool:
        """Return whether no prompt has this word or a system message, so that `data.system_prompt` may say it."""
        asked = [row["prompt"] for row in self.rows]
        return not any(word in str(said) or said[0]["role"] == "system" for said in asked)

    def write(self, *, keep_others: bool) -> bool:
        """Write the rows to `target`; returns False where they are there already.

        keep_others: with the other columns in `extra_info`, for reward functions that name them. Raises InitError for
        a target that holds anything else.
        """
        has_others = keep_others and any(row["others"] for row in self.rows)
        written = pa.BufferOutputStream()  # so that a failure leaves no file
        try:
            made = pa.Table.from_pylist([self._kept(row) if has_others else _without(row) for row in self.rows])
            pq.write_table(made, written)
        except pa.ArrowException as error:
            message = f"{self.file}: cannot be written as parquet ({error}); give each column values of one type"
            raise InitError(message) from error
        if self.target.exists():
            if _holds(self.target, made):
                return False
            raise InitError(
                f"{self.target} is there, with other rows; move it away, or give the data file another name"
            )
        self.target.parent.mkdir(exist_ok=True)
        self.target.write_bytes(written.getvalue())
        return True

    def _kept(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {**_without(row), "extra_info": row["others"]}


def read_users_prompts(file: Path) -> UsersPrompts:
    """Reads a data file. Raises InitError without prompts and answers, and DataError for a file that is unreadable."""
    if not file.is_file():
        raise InitError(f"no such file: {file}; give a parquet or JSON lines file with prompts and answers")
    table = open_table(file)
    first = [row for row in islice(table.rows(table.columns), _FIRST) if isinstance(row, dict)]
    columns = prompt_columns(file, table.columns, first)
    if columns is None:
        raise InitError(
            f"{file}: no columns with a question and its answer among {', '.join(table.columns) or 'none'}; rename "
            "them to prompt (a text, or a list of messages) and answer"
        )
    is_ours = all(column in table.columns for column in OURS) and not columns.is_text
    others = dict.fromkeys(
        name for name in table.columns if name not in (columns.question, columns.answer, *OURS, "id")
    )
    if is_ours:
        others = {name: None for row in first for name in row.get("extra_info") or ()}
    rows = [made for row in table.rows(table.columns) if isinstance(row, dict) and (made := _made(row, columns, table))]
    if not rows:
        raise InitError(f"{file}: no row has both a question and an answer")
    return UsersPrompts(file, columns, tuple(others), rows, table.count - len(rows), is_ours)


def _made(row: Mapping[str, Any], columns: PromptColumns, table: Table) -> dict[str, Any] | None:
    """A row with our columns, and the rest in `others`; None for a row without a question or an answer.

    The expressions are those that the message for a file with other columns shows.
    """
    if any(row.get(name) is None for name in (columns.question, columns.answer) if name):
        return None
    cells = {**row, columns.answer: _exact(row[columns.answer], table, columns.answer)} if columns.answer else row
    made = {name: eval(text, {"row": cells}) for name, text in columns.made.items()}
    others = {name: value for name, value in row.items() if name not in (columns.question, *OURS, "id")}
    if columns.answer and "####" not in columns.made["reward_model"]:
        others.pop(columns.answer)  # the ground truth itself; of GSM8K the solution before it is kept
    return {**made, "others": others}


def _exact(value: Any, table: Table, column: str) -> Any:
    """An answer; a number as the text that its type means, so that nothing rounds it. Raises InitError for NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return value
    try:
        return number_text(value, table.precision(column))
    except ValueError as error:
        raise InitError(f"column {column!r}: a ground truth {error}; correct or remove the row") from error


def _without(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "others"}


def _holds(file: Path, rows: pa.Table) -> bool:
    """Whether a file holds just these rows."""
    try:
        there = pq.read_table(file)
    except (pa.ArrowException, OSError):
        return False
    return json.dumps(there.to_pylist(), default=str) == json.dumps(rows.to_pylist(), default=str)
