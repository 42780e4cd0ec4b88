"""Dumps as JSON lines: one trajectory a line, in the form of `Trajectory.to_json` and a few fields more."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.tracking.records import AT_ONCE, GiveWay, Record

T = TypeVar("T")
_NUMBER = 4
"""Writing a number takes as long as other work on this number of tokens."""


def write_lines(path: Path, records: Iterable[Record]) -> None:
    """Write records, a line each. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.writelines(pieces_of_line(record))


def read_lines(path: Path, places: Collection[int] | None = None) -> Iterator[Record]:
    """The records, or those at some places, one in memory at a time. Raises DamagedFileError."""
    with path.open("rb") as file:
        for place, line in enumerate(file):
            if places is None or place in places:
                yield _parsed(line, f"{path}, line {place + 1},")


def parts_of_lines(path: Path, take: Callable[[int, Record], T]) -> Iterator[T]:
    """What `take` makes of the place of each record and the record. Raises DamagedFileError."""
    for place, record in enumerate(read_lines(path)):
        try:
            taken = take(place, record)
        except (TypeError, LookupError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DamagedFileError(f"{path}, line {place + 1}, is damaged ({what})") from error
        yield taken


def _parsed(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DamagedFileError(f"{where} is damaged ({error})") from error
    if not isinstance(record, dict):
        raise DamagedFileError(f"{where} is damaged (no object)")
    return record


def pieces_of_line(record: Record) -> Iterator[str]:
    """The line as `json.dumps` gives it, in pieces: a long list is written in parts."""
    give_way, size = GiveWay(), AT_ONCE // _NUMBER
    before = "{"
    for name, value in record.items():
        yield f"{before}{json.dumps(name)}: "
        before = ", "
        if isinstance(value, list) and len(value) > size:
            between = "["
            for start in range(0, len(value), size):
                yield between + json.dumps(value[start : start + size])[1:-1]
                between = ", "
                give_way.after(size * _NUMBER)
            yield "]"
        else:
            yield json.dumps(value)
            give_way.after(size)
    yield "}\n"
