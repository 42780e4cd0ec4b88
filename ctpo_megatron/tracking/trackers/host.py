"""Manages the trackers of a run: their failures are counted and never end the run."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.printable import printable
from ctpo_megatron.base.redact import hidden, redacted
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.signals import children_spared
from ctpo_megatron.tracking.trackers.protocol import OF_THIS_ENVIRONMENT, TENSORBOARD, make

if TYPE_CHECKING:
    from ctpo_megatron.config.extension import Extension
    from ctpo_megatron.config.schema import Config, TrackingConfig


_ROOT = Path(__file__).resolve().parents[3]
# At the end of the path, so that another interpreter finds its own packages first.
_MAIN = f"import sys; sys.path.append({str(_ROOT)!r}); from ctpo_megatron.tracking.trackers.child import main; main()"
_SLICE = 4096  # a pipe that is ready accepts this much without blocking


class TrackerEnded(Exception):
    """A tracker cannot continue; the message is the reason."""


class TrackerProcess:
    """The trainer's side; records wait in the pipe (64 KiB) while the tracker is busy.

    start: what `child.main` creates the tracker from. python: interpreter. timeout_s: for one call of the tracker
    there, and for space in the pipe here. log_path: receives the output of the process.
    """

    def __init__(self, start: Mapping[str, Any], python: str, timeout_s: float, log_path: Path) -> None:
        self._timeout_s = timeout_s
        self._received = b""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with children_spared(), log_path.open("ab") as log_file:
            self._process = subprocess.Popen(
                [python, "-P", "-c", _MAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,  # Ctrl-C must reach the trainer alone
                bufsize=0,
            )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        self._send({**start, "timeout_s": timeout_s})

    def log(self, step: int, metrics: Mapping[str, float]) -> list[str | None]:
        """Send a record; returns outcomes of earlier ones: None, or why one failed. Raises TrackerEnded."""
        self._send({"step": step, "metrics": dict(metrics)})
        return self._outcomes()

    def rewind(self, step: int) -> None:
        """Announce that the steps after `step` come again. Raises TrackerEnded."""
        self._send({"rewind": step})

    def close(self) -> list[str | None]:
        """Let it send the rest, for at most `timeout_s`, and end it; returns the last outcomes. Raises TrackerEnded."""
        self._in.close()
        try:
            self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TrackerEnded(f"did not finish within {self._timeout_s:g} s; what it still had is lost") from error
        finally:
            self.kill()
        outcomes = self._outcomes()
        if self._process.returncode:
            raise TrackerEnded(self._why())
        return outcomes

    def kill(self) -> None:
        """Kill the process and its children."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        deadline = time.monotonic() + self._timeout_s
        poll = select.poll()
        poll.register(self._in, select.POLLOUT)
        while data:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TrackerEnded(f"took no record for {self._timeout_s:g} s (tracking.timeout_s)")
            try:
                data = data[os.write(self._in.fileno(), data[:_SLICE]) :]
            except BrokenPipeError as error:
                raise TrackerEnded(self._why()) from error

    def _outcomes(self) -> list[str | None]:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while poll.poll(0) and (chunk := os.read(self._out.fileno(), 65536)):
            self._received += chunk
        *lines, self._received = self._received.split(b"\n")
        replies = [json.loads(line) for line in lines]
        if ended := [reply["ended"] for reply in replies if "ended" in reply]:
            raise TrackerEnded(ended[0])
        return [reply["failed"] for reply in replies]

    def _why(self) -> str:
        """Why the process ended: its last message, or its exit status."""
        status = self._process.wait(self._timeout_s)
        self._outcomes()
        if status == -signal.SIGALRM:
            return f"a call did not return within {self._timeout_s:g} s (tracking.timeout_s)"
        return f"its process ended (status {status})"


class InProcess:
    """A tracker in the trainer's process: TensorBoard. Returns outcomes as TrackerProcess does."""

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> list[str | None]:
        try:
            self._tracker.log(step, metrics)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        return [None]

    def rewind(self, step: int) -> None:
        self._tracker.rewind(step)

    def close(self) -> list[str | None]:
        self._tracker.close()
        return []

    def kill(self) -> None:
        pass


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
