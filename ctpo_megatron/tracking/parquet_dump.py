"""Dumps as parquet with zstd: a row a trajectory, its tokens as typed arrays (docs/reference/dumps.md)."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.tracking.records import TRACES, GiveWay, Head, Record, statuses

T = TypeVar("T")
_SEGMENT = pa.struct(
    [("turn", pa.int32()), ("kind", pa.string()), ("text", pa.string()), ("token_chars", pa.list_(pa.int32()))]
)
_CALL = pa.struct(
    [
        ("turn", pa.int32()),
        ("name", pa.string()),
        ("arguments", pa.string()),
        ("status", pa.string()),
        ("output", pa.string()),
        ("wall_s", pa.float64()),
        ("exec_s", pa.float64()),
        ("began_at", pa.float64()),
    ]
)
_MORE = pa.struct([("type", pa.string()), ("shape", pa.list_(pa.int32())), ("data", pa.binary())])
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample_index", pa.int32()),
        ("seed", pa.int64()),
        ("data_source", pa.string()),
        ("answer", pa.string()),
        ("finish_reason", pa.string()),
        ("final_text", pa.string()),
        ("reward", pa.float64()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("turn_rewards", pa.list_(pa.float64())),
        ("no_verdict", pa.struct([("cause", pa.string()), ("reason", pa.string())])),
        ("scored_at", pa.list_(pa.float64())),
        ("advantage", pa.float64()),
        ("turn_advantages", pa.list_(pa.float64())),
        ("dropped", pa.bool_()),
        ("token_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_log_probs", pa.list_(pa.float32())),  # exactly what the engine reported
        ("weight_version", pa.list_(pa.int32())),
        ("turn", pa.list_(pa.int32())),
        ("sequence_starts", pa.list_(pa.int32())),
        *((name, pa.list_(pa.float32())) for name in TRACES),
        ("segments", pa.list_(_SEGMENT)),
        ("tool_calls", pa.list_(_CALL)),
        ("more", pa.map_(pa.string(), _MORE)),
        ("other", pa.string()),
    ]
)
"""Columns of a dump. `other`: JSON of fields without a column; null where there are none."""
_FIELDS = frozenset(SCHEMA.names)

_SPLIT = ("token_ids", "rollout_log_probs", *TRACES, "segments.list.element.token_chars")
"""Numbers whose bytes of equal weight compress better side by side."""
_COUNTED = [field.name for field in SCHEMA if not pa.types.is_nested(field.type)]
"""Columns with statistics. No reader asks for the least token of a row group, and finding it takes time."""
_OPTIONAL = {
    *("turn_rewards", "sequence_starts", "no_verdict", "scored_at", "advantage", "turn_advantages", "more"),
    *TRACES,
}
"""Fields that a record lacks where the column is null."""
_GROUP_TOKENS = 1 << 16
"""Tokens of a row group: held in memory as arrays, and read at once to get any of its rows."""
_READ_ROWS = 16
"""Rows that are Python objects at the same time, about 40 times as large as in the file."""
_READ_HEADS = 256
_LINES = "fd6bdc62"
_OF_HEADS = {
    *("prompt_id", "sample_index", "reward", "finish_reason", "response_mask", "log_ratio"),
    *("no_verdict.cause", "tool_calls.status"),
}


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows, whose fields are values or, of each token, sequences or arrays. Raises OSError."""
    split = [f"{name}.list.element" for name in _SPLIT]
    # Without dictionaries: zstd makes long runs of one number as small, in less time.
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": split}
    options["write_statistics"] = _COUNTED
    give_way = GiveWay()
    with pq.ParquetWriter(path, SCHEMA, **options) as writer:
        for part in _parts(rows):
            columns = []
            for field in SCHEMA:
                columns.append(_column(field, part))
                give_way.after(_GROUP_TOKENS if pa.types.is_list(field.type) else len(part))
            writer.write_table(pa.table(columns, schema=SCHEMA))  # without the interpreter's lock


def read_table(path: Path, without: Collection[str] = ()) -> Iterator[Record]:
    """The records, few in memory at a time. Raises DamagedFileError.

    without: columns that are not read.
    """
    with _opened(path) as file:
        wanted = [name for name in file.schema_arrow.names if name not in without]
        for batch in file.iter_batches(_READ_ROWS, columns=wanted):
            yield from map(_record, batch.to_pylist())


def heads_of_table(path: Path) -> Iterator[Head]:
    """What the records are chosen by, without reading the rest. Raises DamagedFileError."""
    place = 0
    with _opened(path) as file:
        for batch in file.iter_batches(_READ_HEADS, columns=_leaves(file, _OF_HEADS)):
            with _named(path):
                heads = list(_heads(batch, place))
            yield from heads
            place += len(heads)


def parts_of_table(path: Path, fields: Collection[str], take: Callable[[Record], T]) -> Iterator[T]:
    """What `take` makes of these fields of each record; the rest is not read. Raises DamagedFileError."""
    with _opened(path) as file:
        for batch in file.iter_batches(_READ_ROWS, columns=_leaves(file, fields)):
            with _named(path):
                taken = [take(row) for row in batch.to_pylist()]
            yield from taken


def _heads(batch: pa.RecordBatch, first: int) -> Iterator[Head]:
    """Of the rows of a batch; first: the place of the first of them."""
    rows = batch.drop_columns(["response_mask", "log_ratio"]).to_pylist()
    traced, sizes = batch["log_ratio"].is_valid().to_pylist(), _sums(batch["response_mask"])
    for place, (row, has, size) in enumerate(zip(rows, traced, sizes, strict=True), start=first):
        yield Head(
            place,
            row["prompt_id"],
            row["sample_index"],
            row["reward"],
            (row.get("no_verdict") or {}).get("cause") or "",
            row["finish_reason"] or "",
            statuses(call["status"] for call in row["tool_calls"]),
            size,
            has,
        )


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What columns that are missing, or have other content, lead to is a DamagedFileError that names the file."""
    try:
        yield
    except (TypeError, LookupError, AttributeError) as error:
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _leaves(file: pq.ParquetFile, wanted: Collection[str]) -> list[str]:
    """Columns of the file to read: of a list of structs, `tool_calls.status` names one field."""
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    return [path for path in paths if path.split(".")[0] in wanted or _ends_of(path) in wanted]


def _ends_of(path: str) -> str:
    parts = path.split(".")
    return f"{parts[0]}.{parts[-1]}"


def _sums(column: pa.ListArray) -> list[int]:
    """The sum of each list of small numbers."""
    sums = np.concatenate([[0], np.cumsum(column.values.to_numpy(zero_copy_only=False), dtype=np.int64)])
    ends = column.offsets.to_numpy()
    found: list[int] = (sums[ends[1:]] - sums[ends[:-1]]).tolist()
    return found


def read_rows(path: Path, places: Collection[int]) -> dict[int, Record]:
    """The records at these places without `more`; only their row groups are read. Raises DamagedFileError."""
    found: dict[int, Record] = {}
    with _opened(path) as file:
        first, wanted = 0, [name for name in file.schema_arrow.names if name != "more"]
        for group in range(file.num_row_groups):
            last = first + file.metadata.row_group(group).num_rows
            if any(first <= place < last for place in places):
                for batch in file.iter_batches(_READ_ROWS, row_groups=[group], columns=wanted):
                    for place in places:
                        if first <= place < first + batch.num_rows:
                            (row,) = batch.slice(place - first, 1).to_pylist()
                            found[place] = _record(row)
                    first += batch.num_rows
            first = last
    return found


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    if path.suffix == ".jsonl":
        raise DamagedFileError(f"{path}: dumps of JSON lines are refused; the last commit that reads them is {_LINES}")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is damaged ({error})") from error


def _record(row: dict[str, Any]) -> Record:
    """Returns the record of a row."""
    other = row.pop("other", None)
    record = {name: value for name, value in row.items() if value is not None or name not in _OPTIONAL}
    if record.get("dropped") is False:
        del record["dropped"]
    if "reward_components" in record:
        record["reward_components"] = dict(record["reward_components"])
    if "more" in record:
        record["more"] = {
            name: column | {"data": base64.b64encode(column["data"]).decode()} for name, column in record["more"]
        }
    for call in record.get("tool_calls", ()):
        call["arguments"] = json.loads(call["arguments"])
    for segment in record.get("segments", ()):
        if segment["token_chars"] is None:
            del segment["token_chars"]
    record.update(json.loads(other or "{}"))
    return record


def _parts(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    part: list[Mapping[str, Any]] = []
    tokens = 0
    for row in rows:
        part.append(row)
        tokens += len(row["token_ids"])
        if tokens >= _GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    yield part


def _column(field: pa.Field, rows: Sequence[Mapping[str, Any]]) -> pa.Array:
    values = [row.get(field.name) for row in rows]
    match field.name:
        case "other":
            rest = [{name: value for name, value in row.items() if name not in _FIELDS} for row in rows]
            return pa.array([json.dumps(other) if other else None for other in rest], field.type)
        case "dropped":
            return pa.array(map(bool, values), field.type)
        case "reward_components":
            return pa.array([[*value.items()] for value in values if value is not None], field.type)
        case "more":
            return pa.array([None if not value else [*map(_further, value.items())] for value in values], field.type)
        case "segments":
            flat = [segment for segments in values for segment in segments or ()]
            columns = [_array([segment.get(part.name) for segment in flat], part.type) for part in _SEGMENT]
            return pa.ListArray.from_arrays(_ends(values), pa.StructArray.from_arrays(columns, fields=[*_SEGMENT]))
        case "tool_calls":
            calls = [[{**call, "arguments": json.dumps(call["arguments"])} for call in value or ()] for value in values]
            return _texts(calls, field.type)
    return _array(values, field.type)


def _further(column: tuple[str, Any]) -> tuple[str, dict[str, Any]]:
    name, values = column
    return name, {"type": values.dtype.str, "shape": values.shape[1:], "data": values.tobytes()}


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Values or, of a list type, sequences or arrays of numbers; None is null."""
    if not pa.types.is_list(kind):
        return _texts(values, kind)
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.asarray(value, dtype) for value in values if value is not None]
    return pa.ListArray.from_arrays(_ends(values), pa.array(np.concatenate([*arrays, np.empty(0, dtype)])))


def _ends(values: Sequence[Any]) -> pa.Array:
    """Offsets of a list column."""
    missing = [value is None for value in values]
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    return pa.array(ends, mask=np.array([*missing, False]) if any(missing) else None)


def _texts(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """UTF-8 has no half of a character, which an escape in JSON may leave in a text: it is replaced."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(_whole(values), kind)


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case list():
            return [*map(_whole, value)]
        case dict():
            return {name: _whole(each) for name, each in value.items()}
    return value
