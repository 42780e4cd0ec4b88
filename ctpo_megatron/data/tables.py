"""Finds and reads parquet files, and reports everything wrong with them at once."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROLES = ("system", "user", "assistant", "tool")
_SHOWN = 20


class DataError(ValueError):
    """A data file is missing or does not follow the schema of docs/data.md; the message lists every cause."""


class Problems:
    """Collects what is wrong, so that one run reports all of it."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def row(self, file: Path, row: int, column: str, value: object, reason: str) -> None:
        """A bad cell; rows count from 0."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        self._lines.append(f"{file} row {row} column {column!r}: {reason} (value: {shown})")

    def general(self, line: str) -> None:
        """A problem of a whole file."""
        self._lines.append(line)

    def raise_if_any(self) -> None:
        """Raise DataError with the first problems and their total number."""
        if not self._lines:
            return
        total = len(self._lines)
        more = f"\n  ... and {total - _SHOWN} more" if total > _SHOWN else ""
        lines = "".join(f"\n  {line}" for line in self._lines[:_SHOWN])
        raise DataError(f"{total} problem{'s' * (total > 1)} in the data files:{lines}{more}")


def find_files(patterns: Sequence[str], problems: Problems) -> list[Path]:
    """Files for paths and glob patterns, in the order given (matches of a pattern sorted, `**` allowed)."""
    files: list[Path] = []
    for pattern in patterns:
        is_pattern = glob.has_magic(pattern) and not Path(pattern).exists()
        found = sorted(glob.glob(pattern, recursive=True)) if is_pattern else [pattern]
        files += [path for path in map(Path, found) if path.is_file()]
        if not any(Path(path).is_file() for path in found):
            what = "no file matches" if is_pattern else "no such file:"
            problems.general(f"{what} {pattern}; {_nearby(Path(pattern))}")
    return files


def read_rows(
    file: Path, required: Sequence[str], optional: Sequence[str], problems: Problems
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, cells of the named columns that exist) of every row; nothing when a required column is missing."""
    try:
        names = pq.read_schema(file).names
        missing = [column for column in required if column not in names]
        for column in missing:
            near = difflib.get_close_matches(column, names, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            problems.general(f"{file}: no column {column!r}; the columns are {', '.join(names)}{hint}")
        if missing:
            return
        table = pq.read_table(file, columns=[c for c in (*required, *optional) if c in names])
    except (pa.ArrowException, OSError) as error:
        problems.general(f"{file}: not a readable parquet file ({error})")
        return
    yield from enumerate(table.to_pylist())


def count_rows(file: Path) -> int:
    """Rows of a file; 0 for one that cannot be read, which `read_rows` reports."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError):
        return 0


def check_messages(value: object) -> str | None:
    """The reason why `value` is not a list of messages with a role and a text, or None when it is one."""
    if not isinstance(value, list) or not value:
        return "expected a non-empty list of {role, content}"
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            return f"message {index} is not a {{role, content}} record"
        if message.get("role") not in ROLES:
            return f"message {index} has role {message.get('role')!r}, expected one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {index} has no text in 'content'"
        extra = sorted(key for key, cell in message.items() if key not in ("role", "content") and cell is not None)
        if extra:
            return f"message {index} has fields that are not supported: {', '.join(extra)}"
    return None


def plain_messages(value: list[dict[str, Any]]) -> tuple[dict[str, str], ...]:
    """Checked messages without the null fields that a parquet struct may carry."""
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def _nearby(path: Path) -> str:
    """What exists close to a path that does not: the nearest folder above and the parquet files in it."""
    folder = path.parent
    while glob.has_magic(str(folder)) or not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".parquet" or entry.is_dir())
    ranked = difflib.get_close_matches(path.name, names, n=5, cutoff=0.3) or names[:5]
    return f"{folder} holds {', '.join(ranked)}" if ranked else f"{folder} holds no parquet file"
