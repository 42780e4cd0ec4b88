"""Readable dumps of trajectories: token records and decoded text, written in the background."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ctpo_megatron.base.files import DamagedFileError, aside
from ctpo_megatron.base.run_paths import EVALUATION, TRAJECTORIES, RunPaths, discarded, step_in

if TYPE_CHECKING:
    from ctpo_megatron.data.batch import Group
    from ctpo_megatron.data.trajectory import Trajectory

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept (`lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`)."""

Form = Literal["jsonl", "parquet"]
Record = dict[str, Any]

_INTEGERS = ("token_ids", "response_mask", "loss_mask", "weight_version", "turn")
TOLD_APART = 20_000
"""Tokens of a parquet dump with `token_chars`: more than a report shows; decoding one by one is slow."""

WAITING = 2
"""Limit of dumps that are queued or being written: each holds the trajectories of a step in memory."""
DEADLINE_S = 600.0


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Iterable[Group],
    decode: Decode,
    folder: str = TRAJECTORIES,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
    form: Form = "jsonl",
) -> Path:
    """Write `<folder>/step_%06d.<form>`, one trajectory per line or row, and return its path.

    A record is `Trajectory.to_json()` plus `answer`, `data_source` and `segments`, a list of {turn, kind:
    prompt|model|observation, text}. A model segment also has `token_chars`, the characters that each token contributes
    to the text. It is absent if they cannot be determined, and in a parquet dump after the first `TOLD_APART` tokens.
    `extra` adds fields by the trajectory's index: `dropped` if it was not trained on. The report draws `advantage` and
    the per-token `log_ratio`, `clip_low` and `clip_high`, lists or arrays of the length of `token_ids`.
    """
    path = RunPaths(Path(run_dir)).dump(step, form, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = _records(groups, decode, extra or {}, TOLD_APART if form == "parquet" else None)
    with aside(path) as written:
        if form == "parquet":
            from ctpo_megatron.tracking.parquet_dump import write_table

            write_table(written, records)
        else:
            with written.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(record, default=_rounded) + "\n" for record in records)
    return path


def read_trajectories(path: Path) -> list[Record]:
    """The records of one dump; `trajectory_of` turns one into a Trajectory. Raises DamagedFileError."""
    if path.suffix == ".parquet":
        from ctpo_megatron.tracking.parquet_dump import read_table

        return read_table(path)
    records = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DamagedFileError(f"{path}, line {number}, is damaged ({error})") from error
            if not isinstance(record, dict):
                raise DamagedFileError(f"{path}, line {number}, is damaged (no object)")
            records.append(record)
    return records


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record of a dump."""
    # Imported here: the report reads dumps on machines without the training stack.
    from ctpo_megatron.data.trajectory import Trajectory

    return Trajectory.from_json(record)


def recorded_trajectories(path: Path) -> list[Trajectory]:
    """The trajectories of one dump, for training. Raises DamagedFileError, also for an invalid edit."""
    found = []
    for number, record in enumerate(read_trajectories(path), start=1):
        try:
            found.append(trajectory_of(record))
            _check(found[-1])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DamagedFileError(f"{path}, trajectory {number}, cannot be trained on ({error})") from error
    return found


def _check(trajectory: Trajectory) -> None:
    """Raises ValueError for what arrays silently accept: truncated lists, and values that change in conversion."""
    integers = {name: getattr(trajectory, name) for name in _INTEGERS}
    lengths = {name: len(values) for name, values in integers.items()}
    lengths["rollout_log_probs"] = len(trajectory.rollout_log_probs)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"its lists differ in length: {lengths}")
    for name, values in integers.items():
        if strange := [value for value in values if type(value) is not int]:
            raise ValueError(f"{name} holds {strange[0]!r}")
    if strange := [value for value in trajectory.response_mask if value not in (0, 1)]:
        raise ValueError(f"response_mask holds {strange[0]!r}")
    if strange := [value for value in trajectory.rollout_log_probs if not math.isfinite(value)]:
        raise ValueError(f"rollout_log_probs holds {strange[0]!r}")
    if not isinstance(trajectory.final_text, str):
        raise TypeError(f"final_text is {trajectory.final_text!r}")


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


def _records(
    groups: Iterable[Group], decode: Decode, extra: Mapping[int, Mapping[str, Any]], told_apart: int | None
) -> Iterator[Record]:
    """told_apart: tokens that get `token_chars`; None: all."""
    decode_one = functools.cache(lambda token: decode([token]))
    pairs = ((group.prompt, trajectory) for group in groups for trajectory in group.trajectories)
    for place, (prompt, trajectory) in enumerate(pairs):
        one_by_one = told_apart is None or told_apart > 0
        if told_apart is not None:
            told_apart -= len(trajectory)
        yield trajectory.to_json() | {
            "answer": prompt.answer,
            "data_source": prompt.data_source,
            "segments": _segments(trajectory, decode, decode_one if one_by_one else None),
            **extra.get(place, {}),
        }


def _rounded(values: Any) -> list[float]:
    """Nats rounded for reading."""
    return [round(value, 6) for value in values.tolist()]


def _segments(trajectory: Trajectory, decode: Decode, decode_one: Callable[[int], str] | None) -> list[Record]:
    segments = []
    keys = zip(trajectory.turn, trajectory.response_mask, strict=True)
    start = 0
    for (turn, by_model), run in itertools.groupby(keys):
        end = start + len(list(run))
        ids = trajectory.token_ids[start:end]
        kind = "prompt" if turn == 0 else "model" if by_model else "observation"
        segment: Record = {"turn": turn, "kind": kind, "text": decode(ids)}
        if by_model and decode_one and (chars := _token_chars(ids, segment["text"], decode, decode_one)) is not None:
            segment["token_chars"] = chars
        segments.append(segment)
        start = end
    return segments


def _token_chars(ids: list[int], text: str, decode: Decode, decode_one: Callable[[int], str]) -> list[int] | None:
    """Characters of `text` per token; a character spread over several tokens counts for the last one."""
    chars: list[int] = []
    pieces: list[str] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        piece = decode_one(token) if len(pending) == 1 else decode(pending)
        if piece.endswith("\ufffd") and len(pending) < 4:  # no UTF-8 character needs more than four byte tokens
            chars.append(0)
            continue
        pieces.append(piece)
        chars.append(len(piece))
        pending = []
    if pending:
        pieces.append(decode(pending))
        chars[-1] = len(pieces[-1])
    return chars if "".join(pieces) == text else None


class DumpWriter:
    """Calls functions that write dumps, one after another, in its own thread.

    A function that fails or does not end within `DEADLINE_S` raises RuntimeError from the next call of any
    method, with step and reason.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dumps")
        self._pending: deque[tuple[str, Future[Path]]] = deque()
        self._lock, self._cpu_s = threading.Lock(), 0.0

    def wait(self) -> None:
        """Return when fewer than `WAITING` dumps are unfinished."""
        while self._pending and (len(self._pending) >= WAITING or self._pending[0][1].done()):
            self._take()

    def put(self, name: str, write: Callable[[], Path]) -> None:
        """Queue a call of `write`, after a `wait`. name: for messages."""
        self.wait()
        self._pending.append((name, self._thread.submit(self._measured, write)))

    def flush(self) -> None:
        """Return when everything is on disk."""
        while self._pending:
            self._take()

    def take_cpu_s(self) -> float:
        """CPU seconds of the thread since the last call."""
        with self._lock:
            spent, self._cpu_s = self._cpu_s, 0.0
        return spent

    def close(self) -> None:
        """Write the rest; failures are logged, because another exception may be propagating."""
        try:
            self.flush()
        except RuntimeError as error:
            log.error("%s", error)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _measured(self, write: Callable[[], Path]) -> Path:
        began = time.thread_time()
        try:
            return write()
        finally:
            with self._lock:
                self._cpu_s += time.thread_time() - began

    def _take(self) -> None:
        name, future = self._pending.popleft()
        try:
            future.result(DEADLINE_S)
        except TimeoutError as error:
            raise RuntimeError(f"{name} is not written after {DEADLINE_S:g} s: is the file system there?") from error
        except Exception as error:
            raise RuntimeError(f"{name} could not be written: {error}") from error
