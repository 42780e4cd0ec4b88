"""Trackers that go wrong in every way, found through `extensions.path`."""

from __future__ import annotations

import builtins
import os
import sys
import time
from pathlib import Path


class Recorder:
    """Writes what it is told to a file; the base of those that go wrong."""

    def __init__(self, run_dir, config, identity=None, **arguments):
        self.identity = identity or "first"
        self.arguments = arguments
        self._file = Path(run_dir) / "recorded.txt"
        self.write(f"made {config['run']['name']} {identity} {arguments}")

    def write(self, line):
        with self._file.open("a") as file:
            file.write(f"{line}\n")

    def log(self, step, metrics):
        print("a tracker may print")
        self.write(f"{step} {sorted(metrics.items())}")

    def rewind(self, step):
        self.write(f"rewind {step}")

    def close(self):
        self.write("closed")


class Fails(Recorder):
    """Raises at the steps named."""

    def log(self, step, metrics):
        if step in self.arguments["steps"]:
            error = getattr(builtins, self.arguments.get("error", "OSError"))
            raise error(f"no route to host, step {step}, key {os.environ.get('TRACKER_API_KEY')}")
        super().log(step, metrics)


class Steers(Recorder):
    """Raises text that steers a terminal, and that cannot be encoded."""

    def log(self, step, metrics):
        raise ValueError("\x1b]0;title\x07\ud800")


class Hangs(Recorder):
    """Never comes back from the first step."""

    def log(self, step, metrics):
        super().log(step, metrics)
        time.sleep(3600)


class Dies(Recorder):
    """Takes its process with it."""

    def log(self, step, metrics):
        os._exit(7)


class CannotStart(Recorder):
    """Raises when it is made."""

    def __init__(self, run_dir, config, identity=None):
        raise PermissionError("not logged in")


class CannotClose(Recorder):
    """Never finishes."""

    def close(self):
        super().close()
        time.sleep(3600)


class Speaks(Recorder):
    """Prints and raises its environment's secrets."""

    def log(self, step, metrics):
        key = os.environ["TRACKER_API_KEY"]
        sys.exit(f"cannot log in with {key}") if step > 1 else None
        raise ValueError(f"cannot log in with {key}")


class NoClose:
    """Lacks a method."""

    def __init__(self, run_dir, config, identity=None):
        pass

    def log(self, step, metrics):
        pass


NOT_CALLABLE = 3
