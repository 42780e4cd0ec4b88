"""Dumps of trajectories that a person (or the report) can read: token records plus decoded text."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctpo_megatron.data.records import Group, Trajectory

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens kept (`lambda ids: tokenizer.decode(ids, skip_special_tokens=False)`)."""

TRAJECTORIES, EVALUATION = "trajectories", "evaluation"


def write_trajectories(
    run_dir: Path,
    step: int,
    groups: Iterable[Group],
    decode: Decode,
    folder: str = TRAJECTORIES,
    extra: Mapping[int, Mapping[str, Any]] | None = None,
) -> Path:
    """Write `<folder>/step_%06d.jsonl`, one trajectory a line, and return its path.

    A line is `Trajectory.to_json()` plus `answer`, `data_source` and `segments`, a list of
    {turn, kind: prompt|model|observation, text}; a model segment also has `token_chars`, the characters each of its
    tokens contributes to the text (absent if the tokens cannot be told apart in it).
    `extra` adds fields by the trajectory's place among all: `dropped` where it was not trained on. The report draws
    `advantage` and the per-token lists `log_ratio`, `clip_low` and `clip_high`, all of the length of `token_ids`.
    """
    path = Path(run_dir) / folder / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    decode_one = functools.cache(lambda token: decode([token]))
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        pairs = ((group.prompt, trajectory) for group in groups for trajectory in group.trajectories)
        for place, (prompt, trajectory) in enumerate(pairs):
            record = trajectory.to_json() | {
                "answer": prompt.answer,
                "data_source": prompt.data_source,
                "segments": _segments(trajectory, decode, decode_one),
            }
            file.write(json.dumps(record | dict((extra or {}).get(place, {}))) + "\n")
    aside.replace(path)
    return path


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """The records of one dump; `trajectory_of` turns one into a Trajectory."""
    # Imported here: the report reads dumps on machines that have no training stack.
    from ctpo_megatron.data.records import with_current_names

    with Path(path).open(encoding="utf-8") as file:
        return [with_current_names(json.loads(line)) for line in file]


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The Trajectory in a record of a dump."""
    from ctpo_megatron.data.records import Trajectory

    names = {field.name for field in dataclasses.fields(Trajectory)}
    return Trajectory.from_json({name: value for name, value in record.items() if name in names})


def trajectory_files(run_dir: Path, folder: str = TRAJECTORIES) -> dict[int, Path]:
    """Dumps of a run by step, in step order."""
    paths = sorted((Path(run_dir) / folder).glob("step_*.jsonl"))
    return {int(path.stem.removeprefix("step_")): path for path in paths}


def discard_dumps(run_dir: Path, after: int) -> None:
    """Rename the dumps of steps beyond `after` to `discarded_step_%06d.jsonl`, over those of an earlier time.

    Neither the report nor a replay sees them: a resumed run is going to write those steps again.
    """
    for folder in (TRAJECTORIES, EVALUATION):
        for step, path in trajectory_files(run_dir, folder).items():
            if step > after:
                path.replace(path.with_name(f"discarded_{path.name}"))


def _segments(trajectory: Trajectory, decode: Decode, decode_one: Callable[[int], str]) -> list[dict[str, Any]]:
    segments = []
    keys = zip(trajectory.turn, trajectory.response_mask, strict=True)
    start = 0
    for (turn, by_model), run in itertools.groupby(keys):
        end = start + sum(1 for _ in run)
        ids = trajectory.token_ids[start:end]
        kind = "prompt" if turn == 0 else "model" if by_model else "observation"
        segment: dict[str, Any] = {"turn": turn, "kind": kind, "text": decode(ids)}
        if by_model and (chars := _token_chars(ids, segment["text"], decode, decode_one)) is not None:
            segment["token_chars"] = chars
        segments.append(segment)
        start = end
    return segments


def _token_chars(ids: list[int], text: str, decode: Decode, decode_one: Callable[[int], str]) -> list[int] | None:
    """Characters of `text` per token; a character spread over several tokens counts for the last of them."""
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
