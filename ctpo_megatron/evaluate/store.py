"""The samples of one evaluation on disk: appended as they are scored, and read again on resume."""

from __future__ import annotations

import fcntl
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ctpo_megatron.base.files import DamagedFileError, write_json
from ctpo_megatron.config import ConfigError, Problem
from ctpo_megatron.evaluate.samples import Sample

SETTINGS_FILE, SAMPLES_FILE = "evaluation.json", "samples.jsonl"
_ADVICE = "give another --output, or delete this one, to start again"


class SampleStore:
    """`samples.jsonl` of a directory, one sample per line; locked by this process until `close`.

    settings: everything that the samples depend on, stored in `evaluation.json` as plain JSON. Raises ConfigError when
    the directory holds samples of other settings, naming the differences, or is locked by another process.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / SAMPLES_FILE).open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(
                [Problem("--output", "another process writes to it; wait until it has ended", _ADVICE, str(directory))]
            ) from error
        # As JSON returns them, with lists for tuples: compared with what was stored.
        self._agree(directory, json.loads(json.dumps(settings)))
        # One without a verdict is sampled again: the judge may answer the next time.
        self._samples = {(each.prompt_id, each.index): each for each in self._read() if each.score is not None}

    def _agree(self, directory: Path, settings: Mapping[str, Any]) -> None:
        file = directory / SETTINGS_FILE
        if not file.exists():
            write_json(file, settings, durable=True)
            return
        try:
            former = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            self._file.close()
            message = f"its {SETTINGS_FILE} is damaged ({error}): which settings its samples are of is unknown"
            raise ConfigError([Problem("--output", message, _ADVICE, str(directory))]) from error
        differing = [key for key in sorted({*former, *settings}) if former.get(key) != settings.get(key)]
        if differing:
            self._file.close()
            was = [f"of {key} {former.get(key)!r}, not {settings.get(key)!r}" for key in differing]
            message = f"its samples are {'; '.join(was)}"
            raise ConfigError([Problem("--output", message, _ADVICE, str(directory))])

    def _read(self) -> Iterable[Sample]:
        """All complete lines. A truncated last line is removed, so that the next one is not appended to it."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                break
            end += len(line)
            try:
                record = json.loads(line)
                yield Sample(**{**record, "calls": tuple(record["calls"])})
            except (ValueError, TypeError, KeyError) as error:
                raise DamagedFileError(f"{self._file.name}, line {number}, is damaged ({error}); {_ADVICE}") from error

    def add(self, samples: Iterable[Sample]) -> None:
        """Store samples; they are flushed to the operating system when this returns."""
        for sample in samples:
            self._file.write(json.dumps(asdict(sample)).encode() + b"\n")
            self._samples[sample.prompt_id, sample.index] = sample
        self._file.flush()

    @property
    def played(self) -> dict[str, set[int]]:
        """Indices of the stored samples, by prompt id."""
        found: dict[str, set[int]] = defaultdict(set)
        for prompt_id, index in self._samples:
            found[prompt_id].add(index)
        return found

    def complete(self, prompt_id: str, samples: int) -> list[Sample]:
        """Return the first `samples` samples of a prompt, in order; empty unless all of them are stored."""
        found = [self._samples.get((prompt_id, index)) for index in range(samples)]
        there = [sample for sample in found if sample is not None]
        return there if len(there) == samples else []

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
