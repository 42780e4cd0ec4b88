"""What can go wrong with the sandbox itself. None of these says anything about a snippet: a snippet has a verdict."""


class SandboxStartError(Exception):
    """A server cannot start, or did not become healthy; the message says what to do."""


class SandboxUnavailable(Exception):
    """No verdict was reached: the sandbox is down, overloaded or broken."""


class LevelRefused(Exception):
    """A process could not be confined at the requested level, or the level does not hold what it promises."""


class WorkerLost(Exception):
    """A template or worker died or hung, and has to be replaced. raised: by an exception of its own, not by a kill."""

    def __init__(self, reason: str, *, raised: bool = False) -> None:
        super().__init__(reason)
        self.raised = raised


class RunFault(Exception):
    """A run failed through no fault of its snippet, and its worker is fine. passes: a process limit, retry later."""

    def __init__(self, reason: str, *, passes: bool = False) -> None:
        super().__init__(reason)
        self.passes = passes
