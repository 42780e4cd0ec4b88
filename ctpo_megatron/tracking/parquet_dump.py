"""Dumps as parquet with zstd: token columns are typed arrays instead of text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.base.files import DamagedFileError

if TYPE_CHECKING:
    from ctpo_megatron.tracking.trajectories import Record

_TOKENS = {
    "token_ids": pa.int32(),
    "response_mask": pa.int8(),
    "loss_mask": pa.int8(),
    "rollout_log_probs": pa.float64(),  # exactly what the engine reported
    "weight_version": pa.int32(),
    "turn": pa.int32(),
    "log_ratio": pa.float32(),
    "clip_low": pa.float32(),
    "clip_high": pa.float32(),
}
"""Columns with one number per token; the last three may be null."""
_VALUES = {
    "prompt_id": pa.string(),
    "sample_index": pa.int32(),
    "finish_reason": pa.string(),
    "reward": pa.float64(),
    "data_source": pa.string(),
    "answer": pa.string(),
    "final_text": pa.string(),
}
_OTHER = "other"
"""Column with all other fields of a record, as JSON."""
_SCHEMA = pa.schema(
    [*_VALUES.items(), *((name, pa.list_(kind)) for name, kind in _TOKENS.items()), (_OTHER, pa.string())]
)
_SPLIT = [f"{name}.list.element" for name, kind in _TOKENS.items() if pa.types.is_floating(kind)]
_GROUP_TOKENS = 1_000_000
"""Tokens of a row group, the amount held in memory as arrays."""


def write_table(path: Path, records: Iterable[Record]) -> None:
    """Write records of a dump; per-token fields may be lists or arrays. Raises OSError."""
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": _SPLIT}
    with pq.ParquetWriter(path, _SCHEMA, **options) as writer:
        for part in _parts(records):
            writer.write_table(pa.table([_column(field, part) for field in _SCHEMA], schema=_SCHEMA))


def read_table(path: Path) -> list[Record]:
    """The records, without missing fields. Raises DamagedFileError."""
    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is damaged ({error})") from error
    records = []
    for row in rows:
        other = json.loads(row.pop(_OTHER))
        # A null per-token field is omitted from the record.
        records.append({name: value for name, value in row.items() if value is not None or name in _VALUES} | other)
    return records


def _parts(records: Iterable[Record]) -> Iterator[list[Record]]:
    part: list[Record] = []
    tokens = 0
    for record in records:
        part.append(record)
        tokens += len(record["token_ids"])
        if tokens >= _GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    yield part


def _column(field: pa.Field, records: Sequence[Record]) -> pa.Array:
    if field.name == _OTHER:
        typed = _TOKENS.keys() | _VALUES.keys()
        rest = ({name: value for name, value in record.items() if name not in typed} for record in records)
        return pa.array([json.dumps(record) for record in rest], field.type)
    if field.name in _VALUES:
        return pa.array([record[field.name] for record in records], field.type)
    rows = [record.get(field.name) for record in records]
    dtype = field.type.value_type.to_pandas_dtype()
    arrays = [np.asarray(row, dtype) for row in rows if row is not None]
    ends = np.cumsum([0, *(0 if row is None else len(row) for row in rows)])
    missing = np.array([row is None for row in rows], bool)
    return pa.ListArray.from_arrays(
        pa.array(ends, pa.int32(), mask=np.append(missing, False)), np.concatenate([*arrays, np.empty(0, dtype)])
    )
