"""What can go wrong with the sandbox itself. None of these says anything about a snippet: a snippet has a verdict."""

from typing import Literal


class SandboxStartError(Exception):
    """A server cannot start, or did not become healthy; the message says what to do. killed: by SIGKILL."""

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


class SandboxUnavailable(Exception):
    """No verdict was reached: the sandbox is down, overloaded or broken."""


class LevelRefused(Exception):
    """A process could not be confined at the requested level, or the level does not hold what it promises."""


class WorkerLost(Exception):
    """A template or worker died or hung, and has to be replaced.

    raised: by an exception of its own, not by a kill. died: it is gone, and did not merely take too long.
    """

    def __init__(self, reason: str, *, raised: bool = False, died: bool = False) -> None:
        super().__init__(reason)
        self.raised, self.died = raised, died


Over = Literal["", "worker", "killed", "defect"]
"""What failed over a run each time, if the program may have done it: its worker was lost, something killed the run, or
its answer raised an exception."""


class RunFault(Exception):
    """A run failed without a verdict, and its worker is fine. passes: a process limit, retry later."""

    def __init__(self, reason: str, *, passes: bool = False, over: Over = "") -> None:
        super().__init__(reason)
        self.passes, self.over = passes, over
