"""`python -m tests.support.worker -c PROGRAM`: as `python -c PROGRAM`, forked by the shared server of test processes.

pytest-xdist starts its workers with it: importing torch, megatron and transformers costs each of them nine CPU-seconds.
"""

from __future__ import annotations

import os
import pickle
import sys

from tests.support.prefork import SHARED, Child, Start


def main(program: str) -> int:
    """The exit status of the program, which reads and writes where this process does."""
    stdin, stdout, stderr = (f"/proc/{os.getpid()}/fd/{number}" for number in range(3))
    call = pickle.dumps((exec, (program, {"__name__": "__main__"})))
    start = Start(call, ["-c"], dict(os.environ), os.getcwd(), stdout, stderr, stdin)
    status = Child(os.environ[SHARED], start).wait(None)
    assert status is not None
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[-1]))
