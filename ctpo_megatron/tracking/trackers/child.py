"""The process of one tracker: reads records as JSON lines from stdin, writes outcomes as lines to the first stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.base.redact import hidden
from ctpo_megatron.tracking.trackers.protocol import Tracker, make


def main() -> None:
    """Create the tracker, feed it until stdin ends (with the run or its process), close it."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # prints of the tracker must not look like outcomes
    start = json.loads(sys.stdin.readline())
    activate(start["search_path"])
    limit = start["timeout_s"]
    try:
        with _deadline(limit):
            tracker = make(start["name"], start["arguments"], Path(start["run_dir"]), start["config"])
        for line in sys.stdin:
            _reply(replies, "failed", _failure(tracker, line, limit))
        with _deadline(limit):
            tracker.close()
    except BaseException as error:  # no signal raises here, so a SystemExit or KeyboardInterrupt is the tracker's own
        _reply(replies, "ended", _text(error))
        sys.exit(1)


def _failure(tracker: Tracker, line: str, limit: float) -> str | None:
    """Give a message to the tracker; why that failed, or None."""
    try:
        with _deadline(limit):
            message = json.loads(line)
            if "rewind" not in message:
                tracker.log(message["step"], message["metrics"])
            elif rewind := getattr(tracker, "rewind", None):
                rewind(message["rewind"])
    except BaseException as error:  # the trainer counts and logs it
        return _text(error)
    return None


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """After this time the kernel ends this process, even in C code."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _text(error: BaseException) -> str:
    print(hidden("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
    return hidden(f"{type(error).__name__}: {error}")


def _reply(replies: TextIO, kind: str, text: str | None) -> None:
    replies.write(json.dumps({kind: text}) + "\n")
