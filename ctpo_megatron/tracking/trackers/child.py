"""The process of one tracker: reads records as JSON lines from stdin, writes outcomes as lines to the first stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.base.redact import hidden
from ctpo_megatron.tracking.trackers.protocol import make


def main() -> None:
    """Create the tracker, feed it until stdin ends (with the run or its process), close it."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # prints of the tracker must not look like outcomes
    start = json.loads(sys.stdin.readline())
    activate(start["search_path"])
    limit = start["timeout_s"]
    try:
        tracker = _within(
            limit, lambda: make(start["name"], start["arguments"], Path(start["run_dir"]), start["config"])
        )
        for line in sys.stdin:
            _reply(replies, "failed", _outcome(lambda: _within(limit, lambda: _act(tracker, json.loads(line)))))  # noqa: B023
        _within(limit, tracker.close)
    except Exception as error:
        _reply(replies, "ended", _text(error))
        sys.exit(1)


def _act(tracker: Any, message: dict[str, Any]) -> None:
    if "rewind" not in message:
        tracker.log(message["step"], message["metrics"])
    elif rewind := getattr(tracker, "rewind", None):
        rewind(message["rewind"])


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call; after the limit the kernel ends this process, even in C code."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _outcome(call: Callable[[], None]) -> str | None:
    try:
        call()
    except Exception as error:  # the trainer counts and logs it
        return _text(error)
    return None


def _text(error: Exception) -> str:
    print(hidden("".join(traceback.format_exception(error))), file=sys.stderr, flush=True)
    return hidden(f"{type(error).__name__}: {error}")


def _reply(replies: TextIO, kind: str, text: str | None) -> None:
    replies.write(json.dumps({kind: text}) + "\n")
