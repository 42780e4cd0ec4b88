"""What a checkpoint keeps of batches that are sampled ahead: a parquet file of the groups, their tokens as columns."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import AHEAD, AHEAD_JSON
from ctpo_megatron.data.tokens import TOKEN, common_type, joined, records
from ctpo_megatron.data.trajectory import Trajectory

_STATE, _TYPE = b"state", b"type"
"""Metadata: all but the trajectories, as JSON, and the columns of their tokens."""
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration, RecursionError)
"""What content of another form leads to."""
_FACTS, _LENGTH = "facts", "length"
_GROUP_TOKENS = 1 << 18
"""Tokens of a row group."""


def encode_ahead(ahead: Mapping[str, Any]) -> bytes:
    """The file of `Rollouts.state_dict()["ahead"]`."""
    trajectories = [trajectory for record in _sampled(ahead) for trajectory in record["trajectories"]]
    kind = common_type([TOKEN, *(trajectory.tokens.dtype for trajectory in trajectories)])
    metadata = {_STATE: json.dumps(ahead, default=_not_here), _TYPE: json.dumps(kind.descr)}
    schema = _table([], kind).schema.with_metadata(metadata)
    sink = pa.BufferOutputStream()
    split = ["token_ids.list.element", "rollout_log_probs.list.element"]  # smaller, and less work for zstd
    options = {"compression": "zstd", "use_dictionary": False, "use_byte_stream_split": split}
    with pq.ParquetWriter(sink, schema, write_statistics=False, **options) as writer:
        for part in _parts(trajectories):
            writer.write_table(_table(part, kind).cast(schema))
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _parts(trajectories: Sequence[Trajectory]) -> Iterator[Sequence[Trajectory]]:
    """One after another, of `_GROUP_TOKENS` tokens or a few more: the memory of one serves the next."""
    start = tokens = 0
    for end, trajectory in enumerate(trajectories, start=1):
        tokens += len(trajectory)
        if tokens >= _GROUP_TOKENS or end == len(trajectories):
            yield trajectories[start:end]
            start, tokens = end, 0


def _table(trajectories: Sequence[Trajectory], kind: np.dtype[np.void]) -> pa.Table:
    """A row each."""
    tokens = joined([records(0), *(trajectory.tokens for trajectory in trajectories)], kind)
    lengths = [len(trajectory) for trajectory in trajectories]
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64))
    columns = {name: pa.LargeListArray.from_arrays(offsets, _flat(tokens[name])) for name in kind.names or ()}
    facts = pa.array([json.dumps(trajectory.facts()) for trajectory in trajectories], pa.string())
    return pa.table({_FACTS: facts, _LENGTH: pa.array(lengths, pa.int32()), **columns})


def read_ahead(checkpoint: Path) -> dict[str, Any] | None:
    """What `encode_ahead` was given, from the file in a checkpoint; None without one. Raises DamagedFileError."""
    path, older = checkpoint / AHEAD, checkpoint / AHEAD_JSON
    try:
        if path.exists():
            return _decoded(path)
        return _of_json(json.loads(gzip.decompress(older.read_bytes()))) if older.exists() else None
    except (pa.ArrowException, OSError, *_DAMAGE) as error:
        what = " ".join(str(error).split())[:200]
        raise DamagedFileError(
            f"{path} does not hold what was sampled ahead ({type(error).__name__}: {what})"
        ) from error


def _decoded(path: Path) -> dict[str, Any]:
    table = pq.read_table(path)
    ahead: dict[str, Any] = json.loads(table.schema.metadata[_STATE])
    kind = np.dtype([tuple(_as_tuple(each)) for each in json.loads(table.schema.metadata[_TYPE])])
    if kind.hasobject:
        raise TypeError(f"{kind} is no type of numbers")
    lengths = table[_LENGTH].to_numpy()
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"a length is {lengths.min()}")
    flattened = {name: table[name].combine_chunks().flatten() for name in kind.names or ()}
    total = int(lengths.sum(dtype=np.int64))
    if any(len(flat) != total for flat in flattened.values()):  # before that many are allocated
        raise ValueError(f"the lengths add up to {total} tokens, the columns have others")
    tokens = np.zeros(total, kind)
    for name, flat in flattened.items():
        values = flat.flatten() if pa.types.is_fixed_size_list(flat.type) else flat
        tokens[name] = values.to_numpy(zero_copy_only=False).reshape(-1, *kind[name].shape)
    ends = np.cumsum(lengths)
    made = iter(
        Trajectory.of_facts(json.loads(facts), tokens[end - length : end])
        for facts, length, end in zip(table[_FACTS].to_pylist(), lengths, ends, strict=True)
    )
    for record in _sampled(ahead):
        record["trajectories"] = [next(made) for _ in record["trajectories"]]
    return ahead


def _of_json(ahead: dict[str, Any]) -> dict[str, Any]:
    """As written before tokens were columns."""
    for record in _sampled(ahead):
        record["trajectories"] = [Trajectory.from_json(each) for each in record["trajectories"]]
    return ahead


def _sampled(ahead: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The groups that are complete."""
    return (record for batch in ahead["batches"] for record in batch["groups"] if "trajectories" in record)


def _flat(values: NDArray[Any]) -> pa.Array:
    width = int(np.prod(values.shape[1:], dtype=int))
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _as_tuple(column: Sequence[Any]) -> Iterator[Any]:
    return (tuple(part) if isinstance(part, list) else part for part in column)


def _not_here(value: object) -> None:
    """A trajectory, which has a row of its own. Raises TypeError for anything else that is not JSON."""
    if not isinstance(value, Trajectory):
        raise TypeError(f"{value!r} is not JSON")
