"""Readable dumps of trajectories: token records and decoded text, a file a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

from ctpo_megatron.base.files import DamagedFileError, aside
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES, RunPaths, discarded, step_in
from ctpo_megatron.tracking.json_dump import parts_of_lines, pieces_of_line, read_lines, write_lines
from ctpo_megatron.tracking.records import OF_TEXTS, OF_TIMES, TRACES, Head, Record, Times, head_of, texts_in, times_in

if TYPE_CHECKING:
    from ctpo_megatron.data.batch import Group
    from ctpo_megatron.data.trajectory import Trajectory


T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept (`lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`)."""

Form = Literal["jsonl", "parquet"]

_ADDED = ("answer", "data_source", "segments", "advantage", "turn_advantages", "dropped", *TRACES)
"""Fields of a record that no trajectory has."""


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Iterable[Group],
    decode: Decode,
    folder: str = TRAJECTORIES,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
    form: Form = "parquet",
) -> Path:
    """Write `<folder>/step_%06d.<form>`, one trajectory per line or row, and return its path.

    A record is `Trajectory.to_json()` plus `answer`, `data_source` and `segments` (`Texts.segments`). `extra` adds
    fields by the trajectory's index: `dropped` if it was not trained on. The report draws `advantage` and the per-token
    `log_ratio`, `clip_low` and `clip_high`, lists or arrays of the length of `token_ids`. docs/reference/dumps.md
    has all.

    For use in a thread: it lets other threads have the interpreter's lock every few milliseconds.
    """
    path = RunPaths(Path(run_dir)).dump(step, form, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(groups, decode, extra or {}, _as_columns if form == "parquet" else lambda t: t.to_json())
    if folder != TRAJECTORIES:  # nothing else is trained on
        rows = ({name: value for name, value in row.items() if name != "more"} for row in rows)
    with aside(path) as written:
        if form == "parquet":
            from ctpo_megatron.tracking.parquet_dump import write_table

            write_table(written, rows)
        else:
            write_lines(written, map(rounded_traces, rows))
    return path


def each_record(path: Path, without: Sequence[str] = ()) -> Iterator[Record]:
    """The records of one dump, few in memory at a time. Raises DamagedFileError.

    without: fields that need not be read.
    """
    if path.suffix != ".parquet":
        return read_lines(path)
    from ctpo_megatron.tracking.parquet_dump import read_table

    return read_table(path, without)


def read_trajectories(path: Path) -> list[Record]:
    """The records of one dump; `trajectory_of` turns one into a Trajectory. Raises DamagedFileError."""
    return [*each_record(path)]


def read_heads(path: Path) -> list[Head]:
    """What the records of one dump are chosen by. Raises DamagedFileError."""
    if path.suffix != ".parquet":
        return [*parts_of_lines(path, head_of)]
    from ctpo_megatron.tracking.parquet_dump import heads_of_table

    return [*heads_of_table(path)]


def read_texts(path: Path) -> Iterator[list[str]]:
    """The texts of each record of one dump, few in memory at a time: prompt, turns, observations, outputs of tools.

    Raises DamagedFileError.
    """
    return _parts(path, OF_TEXTS, texts_in)


def read_times(path: Path) -> Iterator[Times]:
    """When tools ran and scorers worked, for each record of one dump. Raises DamagedFileError."""
    return _parts(path, OF_TIMES, times_in)


def _parts(path: Path, fields: Collection[str], take: Callable[[Record], T]) -> Iterator[T]:
    """What `take` makes of these fields of each record of one dump. Raises DamagedFileError."""
    if path.suffix != ".parquet":
        return parts_of_lines(path, lambda _, record: take(record))
    from ctpo_megatron.tracking.parquet_dump import parts_of_table

    return parts_of_table(path, fields, take)


def records_at(path: Path, places: Sequence[int]) -> list[Record]:
    """The records at places of one dump, in this order. Raises DamagedFileError."""
    if path.suffix == ".parquet":
        from ctpo_megatron.tracking.parquet_dump import read_rows

        found = read_rows(path, set(places))
    else:
        found = dict(zip(sorted(set(places)), read_lines(path, set(places)), strict=True))
    return [found[place] for place in places]


def export_lines(dumps: Mapping[int, Path], file: TextIO) -> int:
    """Write the records of dumps as JSON lines, each with its `step`; returns how many. Few are in memory at a time.

    dumps: step -> file. Raises OSError, DamagedFileError.
    """
    count = 0
    for step, path in dumps.items():
        for record in each_record(path):
            file.writelines(pieces_of_line({"step": step} | rounded_traces(record)))
            count += 1
    return count


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record of a dump."""
    # Imported here: the report reads dumps on machines without the training stack.
    from ctpo_megatron.data.trajectory import Trajectory

    return Trajectory.from_json(record)


def recorded_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of one dump, for training. Raises DamagedFileError, also for an invalid edit."""
    found = []
    for number, record in enumerate(each_record(path, without=_ADDED), start=1):
        try:
            _check(record)
            found.append(trajectory_of(record))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DamagedFileError(f"{path}, trajectory {number}, cannot be trained on ({error})") from error
    return found


def _check(record: Record) -> None:
    """Raises TypeError for what a trajectory would silently accept."""
    if not isinstance(record["final_text"], str):
        raise TypeError(f"final_text is {record['final_text']!r}")


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


def _rows(
    groups: Iterable[Group],
    decode: Decode,
    extra: Mapping[int, Mapping[str, Any]],
    fields: Callable[[Trajectory], Record],
) -> Iterator[Record]:
    """fields: makes the fields of the trajectory itself."""
    from ctpo_megatron.tracking.segments import texts_of

    texts = texts_of(decode)
    pairs = ((group.prompt, trajectory) for group in groups for trajectory in group.trajectories)
    for place, (prompt, trajectory) in enumerate(pairs):
        own = fields(trajectory)
        yield own | {
            "answer": prompt.answer,
            "data_source": prompt.data_source,
            "segments": texts.segments(own["token_ids"], own["turn"], own["response_mask"]),
            **extra.get(place, {}),
        }


def _as_columns(trajectory: Trajectory) -> Record:
    """Its fields, numbers of tokens as arrays."""
    from ctpo_megatron.data.tokens import COLUMNS, further

    columns = {name: trajectory.tokens[name] for name in COLUMNS}
    return {"no_verdict": None} | trajectory.facts() | columns | {"more": further(trajectory.tokens)}


def rounded_traces(record: Record) -> Record:
    """The record with arrays as lists, traces as float32 numbers with six decimals, which is for reading."""
    import numpy as np

    traces = {name: np.asarray(record[name], np.float32).tolist() for name in TRACES if name in record}
    segments = [
        each | {"token_chars": np.asarray(each["token_chars"]).tolist()} if "token_chars" in each else each
        for each in record.get("segments", ())
    ]
    return (
        record
        | {name: [round(value, 6) for value in values] for name, values in traces.items()}
        | ({"segments": segments} if "segments" in record else {})
    )


_COLUMNS = ("prompt_id", "data_source", "answer", "reward")


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """answer: the ground truth of the prompt. reward: None without a verdict."""

    prompt_id: str
    data_source: str
    answer: str
    reward: float | None


def read_scores(path: Path) -> list[ScoredAnswer]:
    """The scores of one dump, in its order. Raises DamagedFileError."""
    return [*_parts(path, _COLUMNS, lambda record: ScoredAnswer(*(record[name] for name in _COLUMNS)))]
