"""A tracker as the run calls it: in a process of its own, which cannot stall or end the trainer, or in this one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.base.signals import children_spared

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
