"""Dumps as JSON lines: one trajectory a line, in the form of `Trajectory.to_json` and a few fields more."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.tracking.records import Head, Record

_AT_ONCE = 2_048
"""Numbers that are written by one call, which holds the interpreter's lock for about a millisecond."""
_PAUSE_S = 5e-5


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


def heads_of_lines(path: Path) -> Iterator[Head]:
    """What the records are chosen by. Raises DamagedFileError."""
    for place, record in enumerate(read_lines(path)):
        yield Head(place, record["prompt_id"], record["reward"], "log_ratio" in record)


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
    before = "{"
    for name, value in record.items():
        yield f"{before}{json.dumps(name)}: "
        before = ", "
        if isinstance(value, list) and len(value) > _AT_ONCE:
            between = "["
            for start in range(0, len(value), _AT_ONCE):
                yield between + json.dumps(value[start : start + _AT_ONCE])[1:-1]
                between = ", "
                time.sleep(_PAUSE_S)  # another thread that waits for the lock gets it here
            yield "]"
        else:
            yield json.dumps(value)
    yield "}\n"
