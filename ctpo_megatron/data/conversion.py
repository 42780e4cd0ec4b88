"""Lines of Python that make a file of ours from one with other columns, for the message that refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from ctpo_megatron.data.data_files import JSON, data_kind, data_stem

CONVERSATIONS = "messages"
"""The column that a file of conversations must have."""
_QUESTIONS = ("prompt", "problem", "question", "query", "instruction", "input")
_ANSWERS = ("answer", "final_answer", "expected_answer", "ground_truth", "target", "label", "solution", "output")
_SAID = ("completion", "response", "output", "answer", "solution")
"""Columns of collections, the likeliest first."""
_MARK = "####"
"""Between a worked solution and its answer, in GSM8K."""
Cells = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptColumns:
    """Where a file with other columns has its prompts.

    made: our columns, each with an expression of Python over `row`. question, answer: the columns that it has them in;
    "" where the file has our columns. is_text: whether a question is a text, and no list of messages.
    """

    made: Mapping[str, str]
    question: str
    answer: str
    is_text: bool


def prompt_columns(file: Path, columns: Sequence[str], rows: Cells) -> PromptColumns | None:
    """Finds the prompts of a file by its first rows; None where no columns have a question and its answer."""
    kept = [column for column in ("id", "data_source", "prompt", "reward_model") if column in columns]
    found = _prompt(data_stem(file), columns, rows, kept)
    made = {column: text for column, text in found.items() if text is not None}
    if len(made) < len(found):
        return None
    is_text = made["prompt"] != _cell("prompt")
    question = _first(_QUESTIONS, columns, rows, _is_text) if is_text else "prompt"
    answer = "" if "reward_model" in kept else _answer_column(columns, rows)
    same = {column: _cell(column) for column in kept if column == "id"}
    return PromptColumns({**same, **made}, question or "", answer or "", is_text)


def conversion(file: Path, columns: Sequence[str], rows: Cells, required: Sequence[str], kept: Sequence[str]) -> str:
    """Return the lines, which need pyarrow alone; "" where no columns of the file have a question and its answer.

    rows: the first ones. required: columns of prompt files or conversations. kept: columns that have our names.
    """
    if tuple(required) == (CONVERSATIONS,):
        made, name = {CONVERSATIONS: _conversation(columns, rows)}, "conversations"
    else:
        made, name = _prompt(data_stem(file), columns, rows, kept), "prompts"
    if None in made.values():
        return ""
    made = {**{column: f"row.get({column!r})" for column in kept}, **made}
    taken = [column for column in columns if any(_cell(column) in str(text) for text in made.values())]
    empty = [column for column in taken if any(row.get(column) is None for row in rows)]
    few = " if " + " and ".join(f"row.get({column!r}) is not None" for column in empty) if empty else ""
    parts = [f'"{column}": {text}' for column, text in made.items()]
    target = f"{data_stem(file)}_{name}.parquet"
    lines = [
        *_read(file, sorted({*kept, *taken})),
        "made = [{" + ",\n         ".join(parts) + "}",
        f"        for row in rows{few}]",
        f"pq.write_table(pa.Table.from_pylist(made), {target!r})",
    ]
    return f"; these lines of Python write {target}, which has them:\n\n" + "\n".join(lines) + "\n"


def _prompt(source: str, columns: Sequence[str], rows: Cells, kept: Sequence[str]) -> dict[str, str | None]:
    """An expression for each of our columns, None where there is none."""
    return {
        "data_source": _cell("data_source") if "data_source" in kept else repr(source),
        "prompt": _messages(columns, rows),
        "reward_model": _cell("reward_model") if "reward_model" in kept else _truth(columns, rows),
    }


def _conversation(columns: Sequence[str], rows: Cells) -> str | None:
    asked, said = _messages(columns, rows), _first(_SAID, columns, rows, lambda v: _is_text(v) or _is_talk(v))
    if asked is not None and said is not None:
        answered = _cell(said) if _all(rows, said, _is_talk) else f'[{{"role": "assistant", "content": {_cell(said)}}}]'
        return f"{asked} + {answered}"
    whole = _first(columns, columns, rows, _is_talk)
    return _cell(whole) if whole else None


def _messages(columns: Sequence[str], rows: Cells) -> str | None:
    if _all(rows, "prompt", _is_talk):
        return _cell("prompt")
    asked = _first(_QUESTIONS, columns, rows, _is_text)
    return f'[{{"role": "user", "content": {_cell(asked)}}}]' if asked else None


def _truth(columns: Sequence[str], rows: Cells) -> str | None:
    column = _answer_column(columns, rows)
    if column is None:
        return None
    cell = _cell(column)
    if _all(rows, column, lambda value: isinstance(value, str) and _MARK in value):
        cell = f'{cell}.rpartition("{_MARK}")[2].strip()'
    elif not _all(rows, column, _is_text) and not _all(rows, column, _is_number):
        cell = f"str({cell})"  # one type for all, as parquet has it
    return f'{{"ground_truth": {cell}}}'


def _answer_column(columns: Sequence[str], rows: Cells) -> str | None:
    return _first(_ANSWERS, columns, rows, lambda value: _is_text(value) or _is_number(value))


def _read(file: Path, columns: Sequence[str]) -> list[str]:
    """Lines that import what is needed, and read the file into `rows`."""
    name, kind = str(file), data_kind(file)
    imports = "import pyarrow as pa, pyarrow.parquet as pq"
    if kind in JSON:
        with pa.input_stream(name) as stream:
            is_list = stream.read(1 << 16).decode("utf-8-sig", "ignore").lstrip().startswith("[")
        text = f'pa.input_stream({name!r}).read().decode("utf-8-sig")'
        lines = f"json.loads({text})" if is_list else f'[json.loads(x) for x in {text}.split("\\n") if x.strip()]'
        return [imports.replace("import ", "import json, ", 1), f"rows = {lines}"]
    if file.suffix == ".arrow":
        return [imports, f"rows = pa.ipc.open_stream(pa.memory_map({name!r})).read_all().to_pylist()"]
    return [imports, f"rows = pq.read_table({name!r}, columns={list(columns)}).to_pylist()"]


def _first(names: Iterable[str], columns: Sequence[str], rows: Cells, fits: Callable[[Any], bool]) -> str | None:
    return next((name for name in names if name in columns and _all(rows, name, fits)), None)


def _all(rows: Cells, column: str, fits: Callable[[Any], bool]) -> bool:
    """Whether all cells of a column that are not null have a form, and at least one is there."""
    cells = [cell for row in rows if (cell := row.get(column)) is not None]
    return bool(cells) and all(map(fits, cells))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _cell(column: str) -> str:
    return f"row[{column!r}]"
