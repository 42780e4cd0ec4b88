"""A child of the node program, torchrun or `ray start`, which is killed with it, including its own children."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

from ctpo_megatron.base.stop import heeded


def torchrun(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the exit status of the first failed rank, where torchrun itself would return 1.

    A signal is forwarded to the ranks, once, and torchrun waits for them. Its own handlers would set a deadline.
    """
    for number in heeded():
        signal.signal(number, _pass_on)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(["--signals-to-handle", "SIGQUIT", *arguments]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        print(f"torchrun: rank {failure.local_rank} of this node ended with status {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    return 0


def ray(arguments: Sequence[str]) -> int:
    """Run a `ray` command."""
    from ray.scripts.scripts import cli

    cli(list(arguments))
    return 0


def stop_status(number: int) -> int:
    """Exit status of a process that stopped on request, as in `ctpo train`."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def _pass_on(number: int, _frame: FrameType | None) -> None:
    ranks = psutil.Process().children()
    if not ranks:
        sys.exit(stop_status(number))
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def _end_with_parent() -> None:
    """The node program holds the other end of standard input, which the kernel closes when that program ends."""
    os.read(0, 1)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.killpg(0, signal.SIGKILL)  # this process leads its group


_KINDS: dict[str, Callable[[Sequence[str]], int]] = {"torchrun": torchrun, "ray": ray}

if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.exit(_KINDS[sys.argv[1]](sys.argv[2:]))
