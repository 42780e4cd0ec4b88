"""Scores answers in a child process, which ends when one answer takes too much CPU time or memory."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ctpo_answers

NO_VERDICT = -1.0
_WALL_S = 60
"""For a process that waits instead of computing; CPU time ends the others."""
_MEMORY = 2 * 2**30
"""Bytes that an answer may take."""


def scaled(seconds: float) -> float:
    """`seconds` on a machine as slow as the environment variable CTPO_TEST_SLOWNESS (default 1) says."""
    return seconds * float(os.environ.get("CTPO_TEST_SLOWNESS", "1"))


class Judge:
    """A child process that scores one answer after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def score(self, score: Callable[[str, str], float], answer: str, gold: str, cpu_s: float) -> float:
        """The reward for `answer` in a box; NO_VERDICT where `score` raises or takes more than `cpu_s` or 2 GiB.

        score: a function of `ctpo_answers`.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([score.__name__, f"The answer is \\boxed{{{answer}}}", gold, cpu_s]), file=process.stdin)
        if select.select([process.stdout], [], [], scaled(_WALL_S))[0] and (line := process.stdout.readline()):
            return float(line)
        process.kill()
        process.wait()
        self._process = None
        return NO_VERDICT

    def _start(self) -> subprocess.Popen[str]:
        paths = os.pathsep.join([str(Path(ctpo_answers.__file__).parents[1]), *filter(None, sys.path)])
        return subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"PYTHONPATH": paths},
        )


def _serve() -> None:
    ctpo_answers.score_math("\\boxed{\\sqrt{4}}", "\\pi")  # imports and builds the parser outside the limits
    pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        name, answer, gold, cpu_s = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process, also within C code
        try:
            reward = float(getattr(ctpo_answers, name)(answer, gold))
        except Exception:  # among them: no memory, and a ground truth that is refused elsewhere
            reward = NO_VERDICT
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reward, flush=True)


if __name__ == "__main__":
    _serve()
