"""Rendered rows as a run keeps them, so that it continues with the tokens that it was begun with."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.base.files import DamagedFileError, aside
from ctpo_megatron.data.rows import Location, RowSet, RowTokens

_NOTES = b"ctpo"
"""Key of the notes among a parquet file's metadata."""


@dataclass
class StoredRows:
    """Rows by the digest of what the file held (`row_key`).

    made_of: what their rendering depends on, by name, as digests or short texts. scorer: what gave the verdicts.
    warnings: what admission said of them.
    """

    rows: dict[bytes, RowTokens] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    scorer: str = ""
    warnings: list[str] = field(default_factory=list)

    def changed(self, found: RowSet, *, whole: bool) -> list[tuple[Location, str]]:
        """Rows of the same files that are not what they were, each with what became of it.

        whole: all rows of the files were read, so that missing ones can be told.
        """
        places = {row.place for row in found.made.values()}
        lost = [row.place for key, row in self.rows.items() if key not in found.made and row.place[0] in found.rows]
        changed = [(place, "has changed") for place in lost if place in places]
        return changed + [(place, "is missing") for place in lost if whole and place not in places]

    def write(self, path: Path) -> None:
        """Write them to a parquet file, whole or not at all."""
        rows = self.rows.values()
        columns = {
            "key": pa.array(list(self.rows), pa.binary(16)),
            "file": pa.array([str(row.place[0]) for row in rows], pa.string()).dictionary_encode(),
            "row": pa.array([row.place[1] for row in rows], pa.int64()),
            "token_ids": _lists([row.token_ids for row in rows]),
            "pieces": _lists([row.pieces for row in rows]),
            "verdict": pa.array([row.verdict for row in rows], pa.string()),
        }
        notes = {"made_of": self.made_of, "scorer": self.scorer, "warnings": self.warnings}
        table = pa.table(columns).replace_schema_metadata({_NOTES: json.dumps(notes)})
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path, durable=True) as written:
            pq.write_table(table, written, compression="zstd")

    @classmethod
    def read(cls, path: Path) -> StoredRows:
        """What `write` wrote. Raises DamagedFileError for anything else."""
        try:
            table = pq.read_table(path)
            notes: Mapping[str, Any] = json.loads(table.schema.metadata[_NOTES])
            columns = [table[name].to_pylist() for name in ("key", "file", "row", "verdict")]
            tokens, pieces = _tuples(table["token_ids"]), _tuples(table["pieces"])
            paths = {name: Path(name) for name in set(columns[1])}
            rows = {
                key: RowTokens((paths[file], row), token_ids, lengths, verdict)
                for key, file, row, verdict, token_ids, lengths in zip(*columns, tokens, pieces, strict=True)
            }
            return cls(rows, dict(notes["made_of"]), str(notes["scorer"]), list(notes["warnings"]))
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            what = " ".join(str(error).split())[:200]
            raise DamagedFileError(
                f"{path} does not hold the rows of this run ({type(error).__name__}: {what})"
            ) from error


def _lists(rows: Sequence[Sequence[int]]) -> pa.Array:
    """A column of lists of int32."""
    flat = array("i")
    for row in rows:
        flat.extend(row)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(flat, np.int32)))


def _tuples(column: pa.ChunkedArray) -> list[tuple[int, ...]]:
    """The rows of a column of lists."""
    rows: list[tuple[int, ...]] = []
    for chunk in column.chunks:
        flat, ends = chunk.values.to_numpy().tolist(), chunk.offsets.to_numpy().tolist()
        rows += [tuple(flat[start:end]) for start, end in pairwise(ends)]
    return rows
