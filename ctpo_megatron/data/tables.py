"""Reads data files: parquet, JSON lines, folders of Hugging Face `datasets`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.data.conversion import Cells, conversion
from ctpo_megatron.data.data_files import JSON, data_kind, find_files
from ctpo_megatron.data.numbers import FloatType, json_integer, json_number, precision_of
from ctpo_megatron.data.problems import DataError, Problems

_BATCH = 1000
_UNREADABLE = (DataError, pa.ArrowException, OSError, UnicodeDecodeError)
_MEDIA = ("image", "video", "audio")
_OTHERS = {".csv": "read_csv(FILE)", ".tsv": "read_csv(FILE, sep='\\t')", ".xlsx": "read_excel(FILE)"}
Advise = Callable[[Path, Sequence[str], Cells, Sequence[str], Sequence[str]], str]
"""From a file, its columns, its first rows, the columns wanted and the columns that it has of these: advice, or ""."""


@dataclass(frozen=True)
class Table:
    """An opened file: its columns, how many rows it has, and the rows with the named columns.

    escapes: whether it may hold half of a character, as an escape of JSON. schema: None: of JSON.
    """

    columns: list[str]
    count: int
    rows: Callable[[Sequence[str]], Iterator[Any]]
    escapes: bool = False
    schema: pa.Schema | None = None

    def precision(self, column: str, *fields: str) -> FloatType:
        """Return the type of the numbers in a column, or in a field of its records."""
        return precision_of(self.schema, column, *fields)

    @property
    def media(self) -> list[str]:
        """Columns of images, videos or sounds, which nothing reads."""
        return [name for name in self.columns if name.rstrip("s") in _MEDIA]


def read_rows(
    file: Path,
    required: Sequence[str],
    optional: Sequence[str],
    problems: Problems,
    limit: int | None = None,
    seen: Callable[[Path, Table], None] = lambda _, __: None,
    advise: Advise = conversion,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, cells of the named columns that exist) of the first `limit` rows, or of all.

    Yields nothing when a required column is missing. In JSON lines, a row number is a line number. seen: called with
    the file and its table, if it can be opened. advise: for a file that lacks required columns.
    """
    try:
        table = open_table(file)
        seen(file, table)
        if not table.count or _lacks(file, table, required, optional, problems, advise):
            return
        wanted = [column for column in (*required, *optional) if column in table.columns]
        for row, cells in enumerate(islice(table.rows(wanted), limit)):
            if isinstance(cells, dict):
                halves = [name for name in wanted if table.escapes and not _is_text(cells.get(name))]
                for name in halves:
                    problems.row(file, row, name, cells[name], "holds half of a character (\\ud800 to \\udfff)")
                if not halves:
                    yield row, dict.fromkeys(required) | cells
            elif cells is not None:
                problems.general(f"{file} row {row}: expected a JSON object, not {type(cells).__name__}")
    except _UNREADABLE as error:
        kind = "JSON" if data_kind(file) in JSON else "Arrow" if file.suffix == ".arrow" else "parquet"
        problems.general(f"{file}: not a readable {kind} file ({error}); correct it, or write or download it again")


def count_all_rows(patterns: Sequence[str]) -> int | None:
    """Rows of all files that paths, folders and patterns name; None when any of them is empty or cannot be read."""
    problems = Problems()
    files = find_files(patterns, problems)
    try:
        counts = [open_table(file).count for file in files]
    except _UNREADABLE:  # `read_rows` reports it
        return None
    return sum(counts) if all(counts) and not problems.lines else None


def open_table(file: Path) -> Table:
    """Open a file by its suffix; an unknown suffix is read as parquet.

    Raises DataError for a file that does not have the format of its suffix, else what the reader raises.
    """
    kind = data_kind(file)
    if kind in JSON:
        return _open_json(file)
    if kind in _OTHERS:
        how = f"pandas.{_OTHERS[kind]}.to_json(OUT, orient='records', lines=True)"
        raise DataError(f"{kind} is not read; make it JSON lines: {how}")
    if file.suffix == ".arrow":
        table = pa.ipc.open_stream(pa.memory_map(str(file))).read_all()
        return Table(
            table.column_names,
            table.num_rows,
            lambda names: _batches(table.select(names).to_batches(_BATCH)),
            schema=table.schema,
        )
    if not file.stat().st_size:
        raise DataError("it is empty: 0 bytes")
    parquet = pq.ParquetFile(file)
    return Table(
        parquet.schema_arrow.names,
        parquet.metadata.num_rows,
        lambda names: _batches(parquet.iter_batches(_BATCH, columns=list(names))),
        schema=parquet.schema_arrow,
    )


def _batches(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield from batch.to_pylist()


_DECODER = json.JSONDecoder(parse_int=json_integer, parse_float=json_number)


def _open_json(file: Path) -> Table:
    """One object per line, or one list of objects; an empty line is None."""
    with pa.input_stream(str(file)) as stream, TextIOWrapper(stream, encoding="utf-8-sig") as unpacked:
        text = unpacked.read()
    lines = text.split("\n")  # str.splitlines() also splits at U+2028 and others, which texts may contain
    try:
        if text.lstrip().startswith("["):
            rows = _DECODER.decode(text)
        else:
            rows = [_DECODER.decode(line) if line.strip() else None for line in lines]
    except json.JSONDecodeError as error:
        line = lines.index(error.doc) + 1 if error.doc != text else error.lineno
        raise DataError(f"line {line}: {error.msg} at character {error.colno}") from error
    columns = list(dict.fromkeys(name for row in rows if isinstance(row, dict) for name in row))
    count = sum(row is not None for row in rows)

    def read(names: Sequence[str]) -> Iterator[Any]:
        for row in rows:
            yield {name: row.get(name) for name in names} if isinstance(row, dict) else row

    return Table(columns, count, read, escapes="\\ud" in text or "\\uD" in text)


def _is_text(cell: Any) -> bool:
    """Whether UTF-8 can encode it: JSON escapes can contain unpaired surrogates."""
    try:
        json.dumps(cell, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lacks(
    file: Path, table: Table, required: Sequence[str], optional: Sequence[str], problems: Problems, advise: Advise
) -> bool:
    missing = [column for column in required if column not in table.columns]
    if missing:
        wanted = ", ".join(f'"{name}": ...' for name in required)
        known = ", ".join(table.columns) or f"none, since a row is no object; write each as {{{wanted}}}"
        names = f"column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"
        advice = _advice(file, table, required, optional, problems, advise) or _near(missing, table.columns)
        problems.general(f"{file}: no {names}; the columns are {known}{advice}")
    return bool(missing)


def _near(missing: Sequence[str], columns: Sequence[str]) -> str:
    """The columns that were probably meant."""
    near = [name for column in missing for name in difflib.get_close_matches(column, columns, n=1, cutoff=0.7)]
    return f"; did you mean {', '.join(map(repr, dict.fromkeys(near)))}?" if near else ""


def _advice(
    file: Path, table: Table, required: Sequence[str], optional: Sequence[str], problems: Problems, advise: Advise
) -> str:
    """How to make the columns from what the file has; in full for the first such file."""
    kept = [name for name in (*required, *optional) if name in table.columns]
    rows = [row for row in islice(table.rows(table.columns), _BATCH) if isinstance(row, dict)]
    lines = advise(file, table.columns, rows, required, kept)
    if lines and problems.converted:
        return "; convert it likewise"
    problems.converted |= bool(lines)
    return lines
