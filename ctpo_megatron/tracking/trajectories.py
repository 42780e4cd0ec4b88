"""Readable dumps of trajectories: token records and decoded text, a file a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ctpo_megatron.base.files import DamagedFileError, aside
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES, RunPaths, discarded, step_in
from ctpo_megatron.data.trajectory import Batch, Group, Trajectory
from ctpo_megatron.data.trajectory_file import SCHEMA, read_table, records_in, row_of, trajectories_in, write_table
from ctpo_megatron.tracking.records import TRACES, Decode, Head, Record, YieldGil
from ctpo_megatron.tracking.segments import texts_of

_SEGMENT = pa.struct(
    [("turn", pa.int32()), ("kind", pa.string()), ("text", pa.string()), ("token_chars", pa.list_(pa.int32()))]
)
_ADDED = [
    pa.field("data_source", pa.string()),
    pa.field("answer", pa.string()),
    pa.field("advantage", pa.float64()),
    pa.field("turn_advantages", pa.list_(pa.float64())),
    pa.field("dropped", pa.bool_()),
    *(pa.field(name, pa.list_(pa.float32())) for name in TRACES),
    pa.field("segments", pa.list_(_SEGMENT)),
]
"""Columns that no trajectory has."""
_OF_HEADS = {
    *("prompt_id", "data_source", "answer", "sample_index", "reward", "finish_reason", "log_ratio"),
    "tool_calls.status",
}


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Iterable[Group],
    decode: Decode,
    folder: str = TRAJECTORIES,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write `<folder>/step_%06d.parquet`, one trajectory a row, and return its path.

    A row has the trajectory, `answer`, `data_source` and `segments` (`Texts.segments`). `extra` adds fields by the
    trajectory's index: `dropped` if it was not trained on. The report draws `advantage` and the per-token `log_ratio`,
    `clip_low` and `clip_high`, lists or arrays of the length of `token_ids`. docs/reference/dumps.md has all.

    For use in a thread: it lets other threads have the interpreter's lock every few thousand tokens.
    """
    path = RunPaths(Path(run_dir)).dump(step, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(groups, decode, extra or {})
    if folder != TRAJECTORIES:  # nothing else is trained on
        rows = (row | {"more": None} for row in rows)
    with aside(path) as written:
        write_table(written, rows, _ADDED, after=YieldGil().after)
    return path


def groups_to_dump(
    batch: Batch, diagnostics: Mapping[int, Mapping[str, Any]], most: int | None
) -> tuple[list[Group], dict[int, Mapping[str, Any]]]:
    """Return the groups to write, and what is known of their trajectories by index among them: `dropped` or this.

    diagnostics: by index among the trajectories that are trained on. most: groups; the last ones, which the diagnostics
    are of.
    """
    extra: list[list[Mapping[str, Any]]] = []
    trained = 0
    for group in batch.groups:
        count = len(group.trajectories)
        if group.dropped:
            extra.append([{"dropped": True}] * count)
        else:
            extra.append([diagnostics.get(index, {}) for index in range(trained, trained + count)])
            trained += count
    start = 0 if most is None else max(0, len(extra) - most)
    return batch.groups[start:], dict(enumerate(itertools.chain.from_iterable(extra[start:])))


def _rows(groups: Iterable[Group], decode: Decode, extra: Mapping[int, Mapping[str, Any]]) -> Iterator[Record]:
    texts = texts_of(decode)
    pairs = ((group.prompt, trajectory) for group in groups for trajectory in group.trajectories)
    for place, (prompt, trajectory) in enumerate(pairs):
        own = row_of(trajectory)
        yield own | {
            "answer": prompt.answer,
            "data_source": prompt.data_source,
            "segments": texts.segments(own["token_ids"], own["turn"], own["response_mask"]),
            "dropped": False,
            **extra.get(place, {}),
        }


def read_trajectories(path: Path) -> list[Record]:
    """Return the records of one dump. Raises DamagedFileError."""
    return [*read_table(path, records_in)]


def records_at(path: Path, places: Sequence[int]) -> list[Record]:
    """Return the records at places of one dump, in this order. Raises DamagedFileError."""

    def take(batch: pa.RecordBatch, first: int) -> Iterator[tuple[int, Record]]:
        for place in {*places} & {*range(first, first + batch.num_rows)}:
            yield from ((place, record) for record in records_in(batch.slice(place - first, 1)))

    found = dict(read_table(path, take, places=places))
    return [found[place] for place in places]


def read_heads(path: Path) -> list[Head]:
    """Return what the records of one dump are chosen by. Raises DamagedFileError."""
    return [*read_table(path, _heads, _OF_HEADS)]


def _heads(batch: pa.RecordBatch, first: int) -> Iterator[Head]:
    rows, traced = batch.drop_columns(["log_ratio"]).to_pylist(), batch["log_ratio"].is_valid().to_pylist()
    for place, (row, has) in enumerate(zip(rows, traced, strict=True), start=first):
        tools = tuple(sorted({call["status"] for call in row.pop("tool_calls")}))
        yield Head(place, **row | {"finish_reason": row["finish_reason"] or ""}, tools=tools, traced=has)


def read_texts(path: Path) -> Iterator[list[str]]:
    """Yield the texts of each record of one dump, few in memory at a time: prompt, turns, observations, outputs of
    tools.

    Raises DamagedFileError.
    """
    return read_table(path, lambda batch, _: map(_texts, batch.to_pylist()), ("segments.text", "tool_calls.output"))


def _texts(record: Record) -> list[str]:
    return [*(part["text"] for part in record["segments"]), *(call["output"] for call in record["tool_calls"])]


def recorded_trajectories(path: Path) -> list[Trajectory]:
    """Return the trajectories of one dump, for training. Raises DamagedFileError, also for an invalid edit."""
    found = [*read_table(path, trajectories_in, SCHEMA.names)]
    for number, trajectory in enumerate(found, start=1):
        if why := _unfit(trajectory):
            raise DamagedFileError(f"{path} is damaged (trajectory {number}: {why})")
    return found


def _unfit(trajectory: Trajectory) -> str:
    """What a trajectory silently accepts, and no update can use; empty without."""
    log_probs = trajectory.tokens["rollout_log_probs"]
    if not np.isfinite(log_probs).all():
        return f"rollout_log_probs holds {log_probs[np.isfinite(log_probs).argmin()]}"
    for name in ("response_mask", "loss_mask"):
        if (trajectory.tokens[name] > 1).any():
            return f"{name} holds {trajectory.tokens[name].max()}"
    return "" if isinstance(trajectory.final_text, str) else f"final_text is {trajectory.final_text!r}"


def trajectory_files(run_dir: Path, folder: str = TRAJECTORIES) -> dict[int, Path]:
    """Dumps of a run by step, in step order; other files are ignored."""
    paths = sorted((Path(run_dir) / folder).glob("*.jsonl")) + sorted((Path(run_dir) / folder).glob("*.parquet"))
    steps = {path: step_in(path.stem) for path in sorted(paths, key=lambda path: path.name)}
    return {step: path for path, step in steps.items() if step is not None}


def discard_dumps(run_dir: Path, after: int) -> None:
    """Rename the dumps of steps beyond `after` to `discarded_step_%06d.*`, replacing earlier discarded ones.

    The report and a replay ignore them: a resumed run will write those steps again.
    """
    for folder in (TRAJECTORIES, EVALUATION):
        for step, path in trajectory_files(run_dir, folder).items():
            if step > after:
                path.replace(discarded(path))
