"""Scores answers in a child process, which ends when one answer takes too much CPU time or memory."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import psutil

from ctpo_megatron.rewards.fork_server import fork_server
from tests.support.deadlines import scaled

Score = Callable[[str, str], float]
NO_VERDICT = -1.0
_WALL_S = 60
"""For a process that waits instead of computing; CPU time ends the others."""
_MEMORY = 2 * 2**30
"""Bytes that an answer may take."""


class Judge:
    """A child process that scores one answer after another."""

    def __init__(self) -> None:
        self._context = fork_server(math=True)  # a process has one, which other tests look at
        self._connection: Connection | None = None

    def score(self, score: Score, answer: str, gold: str, cpu_s: float) -> float:
        """The reward for `answer` in a box; NO_VERDICT where `score` raises or takes more than `cpu_s` or 2 GiB."""
        connection = self._connection or self._start()
        with suppress(EOFError, ConnectionError):  # the kernel has killed it
            connection.send((score, f"The answer is \\boxed{{{answer}}}", gold, cpu_s))
            if connection.poll(scaled(_WALL_S)):
                reward: float = connection.recv()
                return reward
        self._process.kill()
        self._process.join()
        self._connection = None
        return NO_VERDICT

    def _start(self) -> Connection:
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        return self._connection


def _serve(connection: Connection) -> None:
    from ctpo_megatron.rewards import score_math

    score_math("\\boxed{1}", "\\pi")  # imports and builds the parser outside the limits
    limit = psutil.Process().memory_info().data + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError):
        while True:
            score, answer, gold, cpu_s = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process, also within C code
            try:
                reward = float(score(answer, gold))
            except Exception:  # among them: no memory, and a ground truth that is refused elsewhere
                reward = NO_VERDICT
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(reward)
