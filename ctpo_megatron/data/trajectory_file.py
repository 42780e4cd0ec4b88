"""Trajectories as parquet with zstd, a row each, their tokens as typed arrays (docs/reference/dumps.md).

One format for what a checkpoint keeps of groups that are sampled ahead, for dumps and for the replay of these. What is
read equals what was written, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import AHEAD, AHEAD_JSON
from ctpo_megatron.data.tokens import COLUMNS, TOKEN, filled, further
from ctpo_megatron.data.trajectory import Trajectory

T = TypeVar("T")
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
        ("finish_reason", pa.string()),
        ("final_text", pa.string()),
        ("reward", pa.float64()),
        ("reward_components", pa.map_(pa.string(), pa.float64())),
        ("turn_rewards", pa.list_(pa.float64())),
        ("no_verdict", pa.struct([("cause", pa.string()), ("reason", pa.string())])),
        ("scored_at", pa.list_(pa.float64())),
        ("token_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.int8())),
        ("loss_mask", pa.list_(pa.int8())),
        ("rollout_log_probs", pa.list_(pa.float32())),  # exactly what the engine reported
        ("weight_version", pa.list_(pa.int32())),
        ("turn", pa.list_(pa.int32())),
        ("sequence_starts", pa.list_(pa.int32())),
        ("tool_calls", pa.list_(_CALL)),
        ("more", pa.map_(pa.string(), _MORE)),
        ("other", pa.string()),
    ]
)
"""Columns of a trajectory. `other`: JSON of fields without a column, and of texts that UTF-8 cannot hold; else null."""
_SPLIT = {"token_ids", "token_chars"}
"""Integers whose bytes of equal weight compress better side by side, as the bytes of all float32 do."""
_STATE, _ROW = b"state", "trajectory"
"""Metadata of a checkpoint's file: its JSON, which has the number of a row, as {_ROW: 3}, for each trajectory."""
_GROUP_TOKENS = 1 << 16
"""Tokens of a row group, which is in memory at once: as Python's objects, about 40 times as large as in the file."""
_LINES = "fd6bdc62"
_FORMER = (
    "holds groups that an earlier version has sampled ahead, which this version cannot continue: finish the run with "
    "the version that wrote them, or train its export as model.path in a run of another name"
)
_DAMAGE = (pa.ArrowException, OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What content of another form leads to, as does RecursionError."""


def encode_ahead(ahead: Mapping[str, Any]) -> bytes:
    """Return the file of `Rollouts.state_dict()["ahead"]`: JSON with trajectories. Raises TypeError for other
    objects.
    """
    found: list[Trajectory] = []

    def placed(value: object) -> dict[str, int]:
        if not isinstance(value, Trajectory):
            raise TypeError(f"{value!r} is not JSON")
        found.append(value)
        return {_ROW: len(found) - 1}

    state = json.dumps(ahead, default=placed)
    sink = pa.BufferOutputStream()
    write_table(sink, map(row_of, found), metadata={_STATE: state})
    content: bytes = sink.getvalue().to_pybytes()
    return content


def read_ahead(checkpoint: Path) -> dict[str, Any] | None:
    """Return what `encode_ahead` was given, from the file in a checkpoint; None without one.

    Raises DamagedFileError, and ValueError for groups in a form of earlier versions.
    """
    path, former = checkpoint / AHEAD, checkpoint / AHEAD_JSON
    if former.exists():
        raise ValueError(f"{former} {_FORMER}")
    if not path.exists():
        return None
    with _named(path):
        file = pq.read_metadata(path)
    if file.num_rows and "facts" in file.schema.names:
        raise ValueError(f"{path} {_FORMER}")
    found = [*read_table(path, trajectories_in)] if file.num_rows else []

    def restored(each: dict[str, Any]) -> Any:
        return found[each[_ROW]] if each.keys() == {_ROW} else each

    with _named(path):
        state = json.loads(file.metadata[_STATE], object_hook=restored)
        if not isinstance(state, dict):
            raise TypeError(f"its state is a {type(state).__name__}")
    return state


def row_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the fields of a trajectory, numbers of tokens as arrays."""
    columns = {name: trajectory.tokens[name] for name in COLUMNS}
    return {"no_verdict": None} | trajectory.facts() | columns | {"more": further(trajectory.tokens)}


def write_table(
    where: Path | pa.NativeFile,
    rows: Iterable[Mapping[str, Any]],
    added: Iterable[pa.Field] = (),
    metadata: Mapping[bytes, str] | None = None,
    after: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Write rows (`row_of`) with the fields of further columns. Raises OSError.

    added: these columns, which may be null. after: called between pieces of work, with their size in tokens.
    """
    schema = pa.schema([*SCHEMA, *added], metadata)
    # Without dictionaries: zstd makes long runs of one number as small, in less time. Statistics of lists and texts are
    # left out: no reader asks for the least token of a row group, and finding it takes time.
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": [*_split(schema)]}
    options["write_statistics"] = [field.name for field in schema if not pa.types.is_nested(field.type)]
    with pq.ParquetWriter(where, schema, **options) as writer:
        for part in _parts(rows):
            writer.write_table(_table(part, schema, after))  # without the interpreter's lock


def read_table(
    path: Path,
    take: Callable[[pa.RecordBatch, int], Iterable[T]],
    fields: Collection[str] | None = None,
    places: Collection[int] | None = None,
) -> Iterator[T]:
    """Yield what `take` makes of the rows of a row group and the place of the first of them, one row group after
    another.

    fields: columns that are read, of a list of structs also one field (`tool_calls.status`). places: rows that are
    wanted; row groups without any are skipped. Raises DamagedFileError, also for what content of another form leads to
    in `take`.
    """
    if path.suffix == ".jsonl":
        raise DamagedFileError(f"{path}: dumps of JSON lines are refused; the last commit that reads them is {_LINES}")
    with _named(path), pq.ParquetFile(path) as file:
        columns = None if fields is None else _leaves(file, fields)
        first = 0
        for group in range(file.num_row_groups):
            end = first + file.metadata.row_group(group).num_rows
            if places is None or any(first <= place < end for place in places):
                for batch in file.read_row_group(group, columns).to_batches():
                    yield from take(batch, first)
                    first += batch.num_rows
            first = end


def records_in(batch: pa.RecordBatch, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows as JSON has them, without `more`. A field is absent where its column is null, but for some.

    These are `reward` and `finish_reason`. In a text, half a character is a question mark.
    """
    for row in _plain(batch, {"more"}):
        yield {name: value for name, value in row.items() if value is not None or name in ("reward", "finish_reason")}


def trajectories_in(batch: pa.RecordBatch, first: int = 0) -> Iterator[Trajectory]:
    """Yield the trajectories of the rows, exactly. Raises ValueError with the number of one that cannot be what it
    says.
    """
    tokens, ends = _tokens(batch, first)
    for number, row in enumerate(_plain(batch, set(COLUMNS), exact=True)):
        try:
            own = tokens[ends[number] : ends[number + 1]]
            # Of the bytes that are there: no type or shape that a file names makes an array of its own size.
            more = {
                name: np.frombuffer(each["data"], np.dtype(each["type"])).reshape(len(own), *each["shape"])
                for name, each in row.get("more") or ()
            }
            yield Trajectory.of_facts(row, filled(own, 0, more) if more else own)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"trajectory {first + number + 1}: {error}") from error


def _plain(batch: pa.RecordBatch, without: set[str], exact: bool = False) -> Iterator[dict[str, Any]]:
    """The rows as Python has them. exact: `other` has a text instead of its column."""
    for row in batch.select([name for name in batch.schema.names if name not in without]).to_pylist():
        other = json.loads(row.pop("other", None) or "{}")
        if "reward_components" in row:
            row["reward_components"] = dict(row["reward_components"])
        for call in row.get("tool_calls", ()):
            call["arguments"] = json.loads(call["arguments"])
        yield row | other if exact else other | row


def _tokens(batch: pa.RecordBatch, first: int) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """The tokens of all rows, which a hand may have edited, and where each row begins, and the last ends."""
    lists = {name: batch[name] for name in COLUMNS}
    lengths = {name: column.value_lengths().fill_null(-1).to_numpy() for name, column in lists.items()}
    wrong = np.logical_or.reduce([(each != lengths["token_ids"]) | (each < 0) for each in lengths.values()])
    if wrong.any():
        here = {name: int(each[wrong.argmax()]) for name, each in lengths.items()}
        raise ValueError(f"trajectory {first + wrong.argmax() + 1}: its lists differ in length: {here} (-1: null)")
    ends = np.cumsum([0, *lengths["token_ids"]], dtype=np.int64)
    made = np.zeros(ends[-1], TOKEN)
    for name, column in lists.items():
        flat, whole = column.flatten(), TOKEN[name].kind != "f"
        if not (pa.types.is_integer(flat.type) or (pa.types.is_floating(flat.type) and not whole)):
            raise ValueError(f"{name} is a column of {flat.type}")
        numbers = flat.fill_null(0).to_numpy()
        with np.errstate(over="ignore"):  # of a float64: `recorded_trajectories` checks whether it is finite
            made[name] = numbers
        wrong = flat.is_null().to_numpy(zero_copy_only=False) | (whole & (made[name] != numbers))
        if wrong.any():
            at = int(wrong.argmax())
            where = first + np.searchsorted(ends, at, "right")
            raise ValueError(f"trajectory {where}: {name} holds {flat[at].as_py()}")
    return made, ends


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What a file of other content leads to is a DamagedFileError that names it."""
    try:
        yield
    except DamagedFileError:
        raise
    except (*_DAMAGE, RecursionError) as error:
        what = " ".join(str(error).split())[:300]
        raise DamagedFileError(f"{path} is damaged ({type(error).__name__}: {what})") from error


def _leaves(file: pq.ParquetFile, fields: Collection[str]) -> list[str]:
    paths = [file.schema.column(index).path for index in range(len(file.schema))]
    return [path for path in paths if path.split(".")[0] in fields or _ends_of(path) in fields]


def _ends_of(path: str) -> str:
    parts = path.split(".")
    return f"{parts[0]}.{parts[-1]}"


def _split(schema: pa.Schema) -> Iterator[str]:
    """Paths of the columns of `_SPLIT` and of float32."""
    for field in schema:
        item = field.type.value_type if pa.types.is_list(field.type) else field.type
        if item == pa.float32() or field.name in _SPLIT:
            yield f"{field.name}.list.element"
        if pa.types.is_struct(item):
            yield from (f"{field.name}.list.element.{each.name}.list.element" for each in item if each.name in _SPLIT)


def _parts(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Rows of `_GROUP_TOKENS` tokens or a few more."""
    part: list[Mapping[str, Any]] = []
    tokens = 0
    for row in rows:
        part.append(row)
        tokens += len(row["token_ids"])
        if tokens >= _GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def _table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema, after: Callable[[int], None]) -> pa.Table:
    names = {*schema.names}
    other = [{name: value for name, value in row.items() if name not in names} for row in rows]
    columns = {}
    for field in schema:
        if field.name == "other":
            continue
        values = [row.get(field.name) for row in rows]
        if field.name in _STORED:
            values = [None if value is None else _STORED[field.name](value) for value in values]
        try:
            columns[field.name] = _array(values, field.type)
        except UnicodeEncodeError:  # half a character, which an escape in JSON may leave in a text
            whole = [*map(_whole, values)]
            columns[field.name] = _array(whole, field.type)
            if field.name in SCHEMA.names:
                for rest, row, one, written in zip(other, rows, values, whole, strict=True):
                    rest |= {field.name: row[field.name]} if one != written else {}
        after(_GROUP_TOKENS if pa.types.is_list(field.type) else len(rows))
    columns["other"] = pa.array([json.dumps(rest) if rest else None for rest in other], pa.string())
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _bytes(columns: Mapping[str, NDArray[Any]]) -> list[tuple[str, dict[str, Any]]] | None:
    """Further columns of tokens by name: numpy's name of the type, the shape of a token's value, the bytes."""
    return [
        (name, {"type": values.dtype.str, "shape": values.shape[1:], "data": values.tobytes()})
        for name, values in columns.items()
    ] or None


_STORED: Mapping[str, Callable[[Any], Any]] = {
    "reward_components": lambda parts: [*parts.items()],
    "tool_calls": lambda calls: [{**call, "arguments": json.dumps(call["arguments"])} for call in calls],
    "more": _bytes,
}
"""Fields that their columns have in another form."""


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column; None is null. Lists may be arrays of numbers."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    item, lists = kind.value_type, [value for value in values if value is not None]
    missing = [value is None for value in values]
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    offsets = pa.array(ends, mask=np.array([*missing, False]) if any(missing) else None)
    if pa.types.is_struct(item):
        flat = [each for value in lists for each in value]
        columns = [_array([each.get(field.name) for each in flat], field.type) for field in item]
        return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(columns, fields=[*item]))
    number = item.to_pandas_dtype()
    joined = np.concatenate([np.empty(0, number), *(np.asarray(value, number) for value in lists)])
    return pa.ListArray.from_arrays(offsets, pa.array(joined))


def _whole(value: Any) -> Any:
    """UTF-8 has no half of a character: a question mark stands for it."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case list():
            return [*map(_whole, value)]
        case tuple():
            return (*map(_whole, value),)
        case dict():
            return {name: _whole(each) for name, each in value.items()}
    return value
