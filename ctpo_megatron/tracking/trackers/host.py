"""Manages the trackers of a run: their failures are counted and never end the run."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.printable import printable
from ctpo_megatron.base.redact import hidden, redacted
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.tracking.trackers.process import InProcess, TrackerEnded, TrackerProcess
from ctpo_megatron.tracking.trackers.protocol import OF_THIS_ENVIRONMENT, TENSORBOARD, make

if TYPE_CHECKING:
    from ctpo_megatron.config.extension import Extension
    from ctpo_megatron.config.schema import Config, TrackingConfig

log = logging.getLogger(__name__)

IN_A_ROW = 3
"""This many consecutive failures switch a tracker off."""

Hosted = TrackerProcess | InProcess


class Trackers:
    """All trackers of a run. No method raises a tracker's exception or waits longer than its deadline."""

    def __init__(self) -> None:
        self._active: dict[str, Hosted] = {}
        self._in_a_row: Counter[str] = Counter()
        self._named: set[str] = set()
        self._failures = 0

    def open(self, name: str, start: Callable[[], Hosted]) -> None:
        """Add the tracker that `start` returns."""
        try:
            self._active[name] = start()
        except Exception as error:
            self._end(name, f"cannot start: {type(error).__name__}: {error}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to every tracker."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def rewind(self, step: int) -> None:
        """Announce that the steps after `step` will be logged again."""
        self._each(lambda tracker: tracker.rewind(step))

    def take_failures(self) -> int:
        """Failures since the last call."""
        failures, self._failures = self._failures, 0
        return failures

    def close(self) -> None:
        """Let every tracker send its remaining records."""
        self._each(lambda tracker: tracker.close())
        self._active.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _each(self, call: Callable[[Hosted], list[str | None] | None]) -> None:
        for name, tracker in list(self._active.items()):
            try:
                for outcome in call(tracker) or ():
                    self._note(name, outcome)
            except TrackerEnded as error:
                self._end(name, str(error))
            except Exception as error:  # any bug, ours or a tracker's: a tracker must not end a run
                self._end(name, f"{type(error).__name__}: {error}")

    def _note(self, name: str, failure: str | None) -> None:
        if failure is None:
            self._in_a_row[name] = 0
            return
        self._failures += 1
        self._in_a_row[name] += 1
        if name not in self._named:
            self._named.add(name)
            log.warning("tracker %s failed (counted as tracking/failures): %s", name, printable(hidden(failure)))
        if self._in_a_row[name] == IN_A_ROW:
            self._switch_off(name, f"{IN_A_ROW} failures in a row, the last: {failure}")

    def _end(self, name: str, cause: str) -> None:
        self._failures += 1
        self._switch_off(name, cause)

    def _switch_off(self, name: str, cause: str) -> None:
        log.error("tracker %s is switched off, and the run continues without it: %s", name, printable(hidden(cause)))
        if tracker := self._active.pop(name, None):
            tracker.kill()


def open_trackers(config: Config, directory: Path) -> Trackers:
    """Start the trackers of a configuration for a run in `directory`; a resumed run continues their records."""
    trackers = Trackers()
    tree = redacted(config.model_dump(mode="json"))
    search_path = [str(Path(folder).resolve()) for folder in config.extensions.path or ()]
    for extension in config.tracking.trackers:
        trackers.open(extension.name, partial(_start, extension, config.tracking, tree, directory, search_path))
    return trackers


def _start(
    extension: Extension, settings: TrackingConfig, tree: Mapping[str, Any], directory: Path, search_path: list[str]
) -> Hosted:
    """tree: the configuration as the tracker may see it, without secrets. search_path: `extensions.path`."""
    name = extension.name
    if name == TENSORBOARD:
        return InProcess(make(name, extension.arguments, directory, tree))
    start = {
        "name": name,
        "arguments": extension.arguments,
        "run_dir": str(directory.resolve()),
        "config": tree,
        "search_path": search_path,
    }
    log_path = RunPaths(directory).logs.tracker(name)
    python = sys.executable if name in OF_THIS_ENVIRONMENT else settings.python or sys.executable
    return TrackerProcess(start, python, settings.timeout_s, log_path)
