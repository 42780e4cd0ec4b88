"""`metrics.jsonl`, also sent to the trackers, and `positions.jsonl`: both survive crashes and resumes."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ctpo_megatron.base.files import DamagedFileError, append_text, naming, patiently, write_text
from ctpo_megatron.base.run_paths import METRICS, POSITIONS, discarded
from ctpo_megatron.tracking.trackers import Trackers

log = logging.getLogger(__name__)

_MEND = ": take the line out, and a resume says which steps are missing"
NONFINITE, FAILURES = "tracking/nonfinite", "tracking/failures"


class MetricsWriter:
    """Appends `{"step": n, "group/name": value, ...}` to a file of the run directory, flushed at every step.

    This file is the run's own record: it is always written, a resumed run truncates it, checkpoints and the report read
    it. `trackers` get the same numbers; the caller closes them. The default file is for the RL steps; other stages
    (sft) have their own.
    """

    def __init__(self, run_dir: Path, trackers: Trackers | None = None, file_name: str = METRICS) -> None:
        self.path = Path(run_dir) / file_name
        records = _read(self.path) if self.path.exists() else []
        if self.path.exists():
            # Drops a half-written last line, so that the next record is not appended to it.
            _write_aside(self.path, records)
        self._open_after(records)
        self._trackers = trackers or Trackers()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step; a second call for the latest step adds to its line.

        A non-finite value is written as null and counted under `tracking/nonfinite`. Failures of trackers since the
        last call are counted under `tracking/failures`. Raises ValueError for a step before the latest one, and
        FileNotFoundError where the file was removed.
        """
        if step < self._last["step"]:
            raise ValueError(f"{self.path}: step {step} after step {self._last['step']}; call truncate_after first")
        values = {name: float(value) for name, value in metrics.items()}
        record: dict[str, Any] = {name: value if math.isfinite(value) else None for name, value in values.items()}
        if step == self._last["step"]:
            record = {**self._last, **record}
            self._file.truncate(self._last_offset)
            self._file.seek(self._last_offset)  # tell() would continue from the old end
        nonfinite = sum(value is None for value in record.values())
        if failures := self._trackers.take_failures():
            record[FAILURES] = failures + record.get(FAILURES, 0.0)
        self._append(step, record | ({NONFINITE: float(nonfinite)} if nonfinite else {}))
        self._trackers.log(step, values)

    @property
    def latest(self) -> dict[str, Any]:
        """The record of the latest step, including `step`; without any, {"step": -1}."""
        return dict(self._last)

    def truncate_after(self, step: int, record: Mapping[str, Any] | None = None) -> None:
        """Remove the lines beyond `step`, which a run resumed from that step will write again.

        They are appended to `discarded_<file>`, in case the resumed run ends before it gets there. record: the value of
        `latest` when the state to resume from was saved. It replaces the line of its step, which a kill may have
        damaged while it was extended.
        """
        self._file.close()
        kept = set_aside_after(self.path, step)
        if record is not None and record["step"] >= 0:
            kept = [line for line in kept if line["step"] < record["step"]] + [dict(record)]
            _write_aside(self.path, kept)
        self._open_after(kept)
        if self.path.name == METRICS:
            self._trackers.rewind(step)

    def close(self) -> None:
        """Close the file; the writer cannot be used afterwards."""
        with naming(self.path):  # a network file system may report only now
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with nullcontext() if error is None else suppress(OSError):  # the first error says what happened
            self.close()

    def _open_after(self, records: list[dict[str, Any]]) -> None:
        """Open the file, which has these records, to append to it."""
        self._last: dict[str, Any] = records[-1] if records else {"step": -1}
        self._file = self.path.open("a", encoding="utf-8")
        # Where the last line begins, which a second call of `log` for its step writes again.
        self._last_offset = self._file.tell() - len(_line(self._last).encode()) if records else 0

    def _append(self, step: int, record: Mapping[str, Any]) -> None:
        self._last = {"step": step, **{name: record[name] for name in sorted(record) if name != "step"}}
        if not self.path.exists():  # a line is written to a file that was removed, too
            raise FileNotFoundError(errno.ENOENT, "was removed while the run was writing to it", str(self.path))
        self._last_offset = self._file.tell()
        patiently(self._write_last, self.path)

    def _write_last(self) -> None:
        """Write the last line, or nothing of it."""
        try:
            self._file.write(_line(self._last))
            self._file.flush()
        except OSError:
            with suppress(OSError):  # what the buffer holds goes with the file
                self._file.close()
            os.truncate(self.path, self._last_offset)
            self._file = self.path.open("a", encoding="utf-8")
            raise


def set_aside_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Move the lines beyond `step` of a file of records to the end of its `discarded` one; returns the others."""
    found = _read(path)
    if beyond := [_line(line) for line in found if line["step"] > step]:
        append_text(discarded(path), "".join(beyond))
    kept = [line for line in found if line["step"] <= step]
    _write_aside(path, kept)
    return kept


def read_metrics(run_dir: Path, file_name: str = METRICS) -> list[dict[str, Any]]:
    """Return all records of a run in step order. A missing file has no records; a half-written last line is ignored."""
    path = Path(run_dir) / file_name
    return _read(path) if path.exists() else []


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:  # includes bytes that are not UTF-8
            if number == len(lines):
                log.warning("%s: the last line is incomplete (the run was interrupted); left out", path)
                break
            raise DamagedFileError(f"{path}, line {number}, is damaged (no JSON: {error}){_MEND}") from error
        if not isinstance(record, dict) or "step" not in record:
            raise DamagedFileError(f"{path}, line {number}, is damaged (no object with a `step`){_MEND}")
        records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _write_aside(path: Path, records: list[dict[str, Any]]) -> None:
    write_text(path, "".join(map(_line, records)), durable=True)


class PositionsWriter:
    """Appends `{"step": n, "mini_batch": "all", ...}`, a line for each record of a step."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / POSITIONS
        self.truncate_after(sys.maxsize)  # drops a half-written last line

    def log(self, step: int, records: Mapping[str, Mapping[str, Any]]) -> None:
        """records: mini-batch (`first`, `last`, `all`) -> `PositionStats.record`. Raises OSError, naming the file."""
        each = ({"step": step, "mini_batch": of} | dict(record) for of, record in records.items())
        lines = (json.dumps(record, separators=(",", ":")) + "\n" for record in each)
        append_text(self.path, "".join(lines))

    def truncate_after(self, step: int) -> None:
        """Set aside the lines beyond `step`, which a run resumed from that step will write again."""
        if self.path.exists():
            set_aside_after(self.path, step)


def read_positions(run_dir: Path, mini_batch: str = "all") -> Iterator[dict[str, Any]]:
    """Yield the records of one mini-batch (`first`, `last`) or of all of a step, in step order; none without a file."""
    return (record for record in read_metrics(run_dir, POSITIONS) if record["mini_batch"] == mini_batch)
