"""Feeds every tracker of a run from a thread of its own: one that fails or hangs stops neither the run nor others."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from queue import Full, Queue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.extensions import activate, shown
from ctpo_megatron.base.stop import children_spared
from ctpo_megatron.base.text import hidden, redacted
from ctpo_megatron.tracking.trackers.protocol import Tracker, make

if TYPE_CHECKING:
    from ctpo_megatron.config.schema import Config

log = logging.getLogger(__name__)

IN_A_ROW = 3
"""This many consecutive failures switch a tracker off."""
MOST_WAITING = 1000
"""Calls that wait for a slow tracker. The next one waits for room, as long as a call may take."""


class _Feed:
    """The thread of one tracker, and the calls that wait for it; one other thread adds them."""

    def __init__(self, name: str, create: Callable[[], Tracker], timeout_s: float) -> None:
        self._name, self._create, self._timeout_s = name, create, timeout_s
        self._waiting: Queue[Callable[[Tracker], None] | None] = Queue(MOST_WAITING)
        self._began = math.inf  # of the call in progress, by `time.monotonic`; infinity between calls
        self._in_a_row, self._failures, self._is_warned, self._is_off = 0, 0, False, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[Tracker], None] | None) -> None:
        """Have the tracker called; None: for the last time. Waits for room at most until a call is overdue."""
        if self._is_off:
            return
        now = time.monotonic()
        if (left_s := min(self._began, now) + self._timeout_s - now) > 0:
            with suppress(Full):
                return self._waiting.put(call, timeout=left_s)
        self._fail(f"a call did not return within {self._timeout_s:g} s (tracking.timeout_s)")

    def end(self, deadline: float) -> None:
        """Wait until the last call is done or it is `deadline` by `time.monotonic`; then abandon the thread."""
        if not self._is_off:
            self._thread.join(max(0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"did not finish within {self._timeout_s:g} s; what it still had is lost")

    def take_failures(self) -> int:
        """Failures since the last call."""
        with self._lock:
            failures, self._failures = self._failures, 0
        return failures

    def _run(self) -> None:
        # Also for what a tracker starts, such as W&B's process: it has to outlive the signal that ends the run.
        with children_spared():
            tracker = self._attempt(self._create)
            while not self._is_off and (call := self._waiting.get()):
                self._attempt(partial(call, tracker), IN_A_ROW)
            if tracker is not None:
                self._attempt(tracker.close)

    def _attempt(self, call: Callable[[], Any], most: int = 1) -> Any:
        """Make a call; failure number `most` in a row switches the tracker off. Returns None for a failure."""
        self._began = time.monotonic()
        try:
            result = call()
        except BaseException as error:  # no signal raises here: a SystemExit is the tracker's own
            self._in_a_row += 1
            often = f"{most} failures in a row, the last: " if most > 1 and self._in_a_row >= most else ""
            self._fail(f"{often}{hidden(shown(error))}", error, is_last=self._in_a_row >= most)
            return None
        finally:
            self._began = math.inf
        self._in_a_row = 0
        return result

    def _fail(self, cause: str, error: BaseException | None = None, *, is_last: bool = True) -> None:
        with self._lock:
            if self._is_off:
                return
            self._failures += 1
            self._is_off, is_warned, self._is_warned = is_last, self._is_warned, True
        known = error if ":" in self._name else None  # who wrote the tracker needs the line
        if is_last:
            log.error(
                "tracker %s is switched off, and the run continues without it: %s", self._name, cause, exc_info=known
            )
        elif not is_warned:
            log.warning("tracker %s failed (counted as tracking/failures): %s", self._name, cause, exc_info=known)


class Trackers:
    """All trackers of a run. No method raises a tracker's exception or waits longer than its deadline."""

    def __init__(self, feeds: Sequence[_Feed] = (), timeout_s: float = 0.0) -> None:
        self._feeds, self._timeout_s = feeds, timeout_s

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step to every tracker."""
        for feed in self._feeds:
            feed.add(methodcaller("log", step, dict(metrics)))  # a copy: a tracker may change it

    def rewind(self, step: int) -> None:
        """Announce that the steps after `step` will be logged again."""
        for feed in self._feeds:
            feed.add(lambda tracker: tracker.rewind(step) if hasattr(tracker, "rewind") else None)

    def take_failures(self) -> int:
        """Failures since the last call."""
        return sum(feed.take_failures() for feed in self._feeds)

    def close(self) -> None:
        """Let the trackers send what they have, side by side, for `tracking.timeout_s` in all."""
        deadline = time.monotonic() + self._timeout_s
        for feed in self._feeds:
            feed.add(None)
        for feed in self._feeds:
            feed.end(deadline)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_trackers(config: Config, directory: Path) -> Trackers:
    """Start the trackers of a configuration for a run in `directory`; a resumed run continues their records."""
    activate(config.extensions.path or ())
    timeout_s = config.tracking.timeout_s
    feeds = []
    for extension in config.tracking.trackers:
        tree = redacted(config.model_dump(mode="json"))  # a tracker may change it
        feeds.append(_Feed(extension.name, partial(make, extension, directory, tree), timeout_s))
    return Trackers(feeds, timeout_s)
