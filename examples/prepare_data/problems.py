"""Reads problems of a raw collection and writes prompt files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ctpo_megatron.base.files import aside
from ctpo_megatron.data import Problems, Table, data_stem, find_files, number_text, number_warning, read_rows
from examples.prompt_file import prompt_row, write_prompt_rows

FloatType = type[np.floating]
"""The floating-point type that a number was stored in."""

COLUMNS = {"problem": "problem", "answer": "answer", "id": "", "data_source": "", "ability": ""}
"""Field of a problem -> the column that holds it by default (`--map` overrides); "": none."""
_QUESTIONS = ("prompt", "problem", "question", "query", "instruction", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "label", "solution", "output")
"""Columns of collections, the likeliest first."""
_ANSWER_TYPES = (str, int, float, Decimal)

Reason = Literal["unreadable", "unverifiable", "conflict", "duplicate", "near duplicate", "contaminated", "overlong"]


@dataclass(frozen=True, slots=True)
class RawProblem:
    """One problem and its final answer."""

    file: str
    row: int
    id: str
    text: str
    answer: str
    data_source: str
    ability: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A dropped problem, with the problem it was compared to."""

    file: str
    row: int
    id: str
    reason: Reason
    detail: str


def read_problems(
    files: Sequence[str],
    columns: Mapping[str, str],
    data_source: str,
    answer_after: str | None,
    doubts: list[str] | None = None,
) -> tuple[list[RawProblem], list[Dropped]]:
    """All problems of some files, and the rows without one.

    columns: as COLUMNS. data_source: for rows without that column; "": the file's name. answer_after: keep the text
    after the last such mark in the answer (GSM8K: `####`). doubts: gets what deserves a warning.
    Raises DataError for files that cannot be read or lack a column.
    """
    found: list[RawProblem] = []
    dropped: list[Dropped] = []
    problems = Problems()
    named = [column for column in columns.values() if column]
    types: dict[str, FloatType] = {}

    def see(_: Path, table: Table) -> None:
        types.update({column: table.precision(column) for column in named})

    for file in find_files(files, problems):
        inexact: list[tuple[int, str]] = []
        for row, cells in read_rows(file, named, (), problems, seen=see, advise=_map_option):
            values = {name: _text(cells.get(column), types.get(column)) for name, column in columns.items()}
            if reason := number_warning(cells.get(columns["answer"]), types[columns["answer"]]):
                inexact.append((row, reason))
            answer = values["answer"]
            if answer_after and answer_after in answer:
                answer = answer.rsplit(answer_after, 1)[1].strip()
            name = values["id"] or f"{data_stem(file)}/{row}"
            if not values["problem"] or not answer:
                lacks = "answer" if values["problem"] else "text"
                dropped.append(Dropped(str(file), row, name, "unreadable", f"no {lacks}"))
                continue
            source = values["data_source"] or data_source or data_stem(file)
            ability = values["ability"] or "math"
            found.append(RawProblem(str(file), row, name, values["problem"], answer, source, ability))
        if inexact and doubts is not None:
            row, reason = inexact[0]
            doubts.append(f"{file} row {row} column {columns['answer']!r}, 1 of {len(inexact):,} such: {reason}")
    problems.raise_if_any()
    return found, dropped


def read_held_out(files: Sequence[str]) -> dict[str, str]:
    """Name -> text of the problems of evaluation files: the last user message of `prompt`. Raises DataError."""
    texts: dict[str, str] = {}
    problems = Problems()
    for file in find_files(files, problems):
        for row, cells in read_rows(file, ("prompt",), ("id",), problems):
            said = [m["content"] for m in cells["prompt"] or [] if isinstance(m, dict) and m.get("role") == "user"]
            if not said or not isinstance(said[-1], str):
                problems.row(file, row, "prompt", cells["prompt"], "has no message of a user")
                continue
            texts[f"{file.parent.name}/{data_stem(file)}/{cells.get('id') or row}"] = said[-1]
    problems.raise_if_any()
    return texts


def write_prompts(problems: Sequence[RawProblem], output: Path) -> None:
    """Write a prompt file (docs/data.md) atomically."""
    rows = []
    for each in problems:
        extra = {"file": each.file, "row": each.row}
        rows.append(prompt_row(each.id, each.data_source, each.text, each.ability, each.answer, extra))
    with aside(output) as written:
        write_prompt_rows(rows, [("file", pa.string()), ("row", pa.int64())], written)


def _map_option(_: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *__: Sequence[str]) -> str:
    """The option that names the columns of a collection; "" where none has questions or none has answers."""
    question, answer = _first(_QUESTIONS, columns, rows, (str,)), _first(_ANSWERS, columns, rows, _ANSWER_TYPES)
    chosen = {"problem": question, "answer": answer}
    pairs = [f"{ours}={theirs}" for ours, theirs in chosen.items() if theirs and ours != theirs]
    return f"; add --map {' '.join(pairs)}" if pairs and all(chosen.values()) else ""


def _first(
    names: Sequence[str], columns: Sequence[str], rows: Sequence[Mapping[str, Any]], types: tuple[type, ...]
) -> str | None:
    """The first column that has cells, and all of these types."""
    for name in names:
        cells = [cell for row in rows if (cell := row.get(name)) is not None]
        if name in columns and cells and all(isinstance(cell, types) and not isinstance(cell, bool) for cell in cells):
            return name
    return None


def _text(value: object, stored: FloatType | None) -> str:
    """A cell as text; "" for a list, a bool, a null or a number that is not finite. stored: of its column's numbers."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return ""
    try:
        return number_text(value, stored or np.float64)
    except ValueError:
        return ""
