"""Readable dumps of trajectories: token records and decoded text, a file a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ctpo_megatron.base.files import DamagedFileError, aside
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES, RunPaths, discarded, step_in
from ctpo_megatron.tracking.records import OF_TEXTS, TRACES, Head, Record, texts_in

if TYPE_CHECKING:
    from ctpo_megatron.data.batch import Group
    from ctpo_megatron.data.trajectory import Trajectory


T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept (`lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`)."""

_ADDED = ("answer", "data_source", "segments", "advantage", "turn_advantages", "dropped", *TRACES)
"""Fields of a record that no trajectory has."""


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Iterable[Group],
    decode: Decode,
    folder: str = TRAJECTORIES,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write `<folder>/step_%06d.parquet`, one trajectory a row, and return its path.

    A record is `Trajectory.to_json()` plus `answer`, `data_source` and `segments` (`Texts.segments`). `extra` adds
    fields by the trajectory's index: `dropped` if it was not trained on. The report draws `advantage` and the per-token
    `log_ratio`, `clip_low` and `clip_high`, lists or arrays of the length of `token_ids`. docs/reference/dumps.md
    has all.

    For use in a thread: it lets other threads have the interpreter's lock every few milliseconds.
    """
    from ctpo_megatron.tracking.parquet_dump import write_table

    path = RunPaths(Path(run_dir)).dump(step, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _rows(groups, decode, extra or {})
    if folder != TRAJECTORIES:  # nothing else is trained on
        rows = ({name: value for name, value in row.items() if name != "more"} for row in rows)
    with aside(path) as written:
        write_table(written, rows)
    return path


def each_record(path: Path, without: Sequence[str] = ()) -> Iterator[Record]:
    """The records of one dump, few in memory at a time. Raises DamagedFileError.

    without: fields that need not be read.
    """
    from ctpo_megatron.tracking.parquet_dump import read_table

    return read_table(path, without)


def read_trajectories(path: Path) -> list[Record]:
    """The records of one dump; `trajectory_of` turns one into a Trajectory. Raises DamagedFileError."""
    return [*each_record(path)]


def read_heads(path: Path) -> list[Head]:
    """What the records of one dump are chosen by. Raises DamagedFileError."""
    from ctpo_megatron.tracking.parquet_dump import heads_of_table

    return [*heads_of_table(path)]


def read_texts(path: Path) -> Iterator[list[str]]:
    """The texts of each record of one dump, few in memory at a time: prompt, turns, observations, outputs of tools.

    Raises DamagedFileError.
    """
    return _parts(path, OF_TEXTS, texts_in)


def _parts(path: Path, fields: Collection[str], take: Callable[[Record], T]) -> Iterator[T]:
    """What `take` makes of these fields of each record of one dump. Raises DamagedFileError."""
    from ctpo_megatron.tracking.parquet_dump import parts_of_table

    return parts_of_table(path, fields, take)


def records_at(path: Path, places: Sequence[int]) -> list[Record]:
    """The records at places of one dump, in this order. Raises DamagedFileError."""
    from ctpo_megatron.tracking.parquet_dump import read_rows

    found = read_rows(path, set(places))
    return [found[place] for place in places]


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


def _rows(groups: Iterable[Group], decode: Decode, extra: Mapping[int, Mapping[str, Any]]) -> Iterator[Record]:
    from ctpo_megatron.tracking.segments import texts_of

    texts = texts_of(decode)
    pairs = ((group.prompt, trajectory) for group in groups for trajectory in group.trajectories)
    for place, (prompt, trajectory) in enumerate(pairs):
        own = _as_columns(trajectory)
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
